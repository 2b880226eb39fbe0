"""XLM against transformers: rows of one language and of translations, outputs, loss, gradients, its config.json.

transformers computes the softmax of attention in fp32, in fp64 models too. Where its attention works in fp64, what
rounds to fp32 does nothing here. The fp32 tests use it as it is.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import XLMConfig as TheirConfig
from transformers import XLMWithLMHeadModel
from transformers.models.xlm.modeling_xlm import MultiHeadAttention

from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import hf_format_of, read_config
from encoder_core.families.xlm import XlmConfig
from tests.support.models import official
from tests.support.models.parity import (
    assert_close,
    assert_same_gradients,
    make_batch,
    masked_loss,
    mean_loss,
    pad,
    states_of,
)
from tests.support.models.peers import in_both_precisions, peers

CONFIG = XlmConfig(
    layers=3,
    hidden=48,
    heads=4,
    feed_forward=192,
    max_length=40,
    vocab=101,
    languages=("en", "fr", "de"),
)
LENGTHS = [17, 40, 3, 1, 28]


@pytest.fixture(scope="module", autouse=True)
def unrounded() -> Any:
    """Their fp64 models are exact; see above."""
    theirs = MultiHeadAttention.forward

    def chosen(attention: Any, states: Tensor, *further: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if states.dtype == torch.float64:
                patch.setattr(Tensor, "float", lambda scores: scores)
            return theirs(attention, states, *further, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MultiHeadAttention, "forward", chosen)
        yield


def translations(lengths: list[int], config: XlmConfig) -> Batch:
    """Rows of which every other one is a translation: positions begin again, and the language changes."""
    batch = make_batch([*lengths], config.vocabulary_size, segments=True)
    languages, restarted = batch.segments, batch.positions.clone()
    assert languages is not None
    languages = torch.where(languages > 0, 2, torch.randint(2, (len(languages),)))
    for row, (start, length) in enumerate(zip(batch.cu_seqlens.tolist(), lengths, strict=False)):
        if row % 2:
            restarted[start + length // 2 : start + length] -= length // 2
    return replace(batch, segments=None, languages=languages, restarted=restarted)


def theirs_on(theirs: XLMWithLMHeadModel, batch: Batch, config: XlmConfig) -> tuple[list[Tensor], Tensor, Tensor]:
    """Hidden states and logits [T, ...], and the loss."""
    padded = pad(batch, config.pad_id)
    lengths = batch.cu_seqlens.diff().tolist()

    def rectangle(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True)

    found = theirs(
        padded.input_ids,
        attention_mask=padded.attention_mask,
        langs=rectangle(batch.languages),
        position_ids=rectangle(batch.absolute_positions),
        output_hidden_states=True,
    )
    states = [padded.flat(state) for state in found.hidden_states]
    return states, padded.flat(found.logits), masked_loss(found.logits, padded.labels)


@in_both_precisions
@pytest.mark.parametrize("languages", [(), ("en",), ("en", "fr", "de")], ids=["none", "one", "three"])
@pytest.mark.parametrize("pad_id", [0, 2])
def test_same_weights_same_outputs(dtype: torch.dtype, languages: tuple[str, ...], pad_id: int) -> None:
    config = CONFIG.model_copy(update={"languages": languages, "pad_id": pad_id})
    ours, theirs = peers(config, dtype)
    batch = translations(LENGTHS, config)
    states, logits, loss = theirs_on(theirs, batch, config)
    for state, expected in zip(states_of(ours.encoder, batch), states, strict=True):
        assert_close(state, expected)
    assert_close(ours.logits(batch), logits[batch.target_positions])
    assert_close(mean_loss(ours(batch)), loss)


def test_same_gradients() -> None:
    ours, theirs = peers(CONFIG, torch.float64, "ours_to_theirs")
    batch = translations(LENGTHS, CONFIG)
    expected = theirs_on(theirs, batch, CONFIG)[2]
    assert_same_gradients(ours, theirs, hf_format_of(CONFIG), mean_loss(ours(batch)), expected)


def test_its_configuration_comes_back() -> None:
    for config in (CONFIG, official.XLM_BASE, CONFIG.model_copy(update={"languages": ()})):
        assert read_config(TheirConfig(**hf_format_of(config).fields).to_dict()) == config
    assert hf_format_of(CONFIG, "none").architecture == "XLMModel"
    unnamed = read_config({"model_type": "xlm", "emb_dim": 64, "n_langs": 2})
    assert isinstance(unnamed, XlmConfig)
    assert unnamed.languages == ("0", "1")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sinusoidal_embeddings", True),
        ("causal", True),
        ("asm", True),
        ("gelu_activation", False),
        ("tie_word_embeddings", False),
    ],
)
def test_models_that_cannot_be_loaded(field: str, value: bool) -> None:
    with pytest.raises(ModelError, match=field):
        read_config(hf_format_of(CONFIG).fields | {field: value})


def test_the_class_has_one_activation_and_inner_width() -> None:
    with pytest.raises(ModelError, match="exact GELU"):
        hf_format_of(CONFIG.model_copy(update={"activation": "gelu_tanh"}))
    with pytest.raises(ValueError, match="4 x hidden"):
        XlmConfig.model_validate(CONFIG.model_dump() | {"feed_forward": 64})
    with pytest.raises(ValueError, match="differ"):
        XlmConfig.model_validate(CONFIG.model_dump() | {"languages": ("en", "en")})
