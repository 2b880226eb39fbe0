"""BART against transformers: states of both sides, logits, losses and gradients, with rows of different lengths."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, BartForConditionalGeneration

from checkpoints.hf.load import load_pretrained
from data_service.store.open import open_store
from encoder_core.batch import Batch
from encoder_core.errors import ModelError, TrainingError
from encoder_core.families.bart import BartConfig
from encoder_core.families.catalogue import hf_format_of, read_config
from encoder_core.objectives.denoise import DenoiseConfig
from encoder_core.objectives.modules.denoising import DenoisingModel
from tests.support.models.parity import (
    assert_close,
    assert_same_gradients,
    make_batch,
    mean_loss,
    pad,
    parameters_of,
    random_weights,
    states_of,
)
from tests.support.models.peers import peers
from tests.support.models.written import export_model

END = 2  # of every row, and what the decoder begins with
CONFIG = BartConfig(layers=3, hidden=32, heads=4, feed_forward=48, max_length=80, vocab=101)
LENGTHS = [([1, 2, 3, 17], [2, 3, 1, 19]), ([40, 7, 80], [33, 9, 66]), ([24, 24], [24, 24])]


def noisy(lengths: list[int], read: list[int], vocab: int = 101) -> Batch:
    """Rows that end with `END`, all tokens targets, with forms of other lengths."""
    batch = make_batch(lengths, vocab)
    tokens = batch.tokens.clone()
    tokens[batch.cu_seqlens[1:].long() - 1] = END
    every = torch.arange(len(tokens))
    form = make_batch(read, vocab, seed=1)
    return replace(batch, tokens=tokens, target_positions=every, target_ids=tokens, causal=True, corrupted=form)


def models(
    dtype: torch.dtype, direction: Literal["theirs_to_ours", "ours_to_theirs"], config: BartConfig = CONFIG
) -> tuple[DenoisingModel, BartForConditionalGeneration]:
    return peers(config, dtype, direction, "denoise", eos_token_id=END, decoder_start_token_id=END)


def assert_same(ours: DenoisingModel, theirs: BartForConditionalGeneration, batch: Batch) -> None:
    """Their decoder gets the labels, and shifts them by itself."""
    assert batch.corrupted is not None
    read, written = pad(batch.corrupted, 1), pad(batch, 1)
    found = theirs(
        read.input_ids,
        attention_mask=read.attention_mask,
        labels=written.labels,
        output_hidden_states=True,
    )
    states = states_of(ours.encoder, batch.corrupted)
    for state, hidden in zip(states, found.encoder_hidden_states, strict=True):
        assert_close(state, read.flat(hidden))
    assert_close(ours.states(batch), written.flat(found.decoder_hidden_states[-1]))
    logits = written.flat(found.logits)
    assert_close(ours.logits(batch), logits)
    loss = mean_loss(ours(batch))
    assert_close(loss, F.cross_entropy(logits, batch.target_ids))
    assert_close(loss.float(), found.loss.float())
    assert ours(batch).metrics["denoise_correct"] == (logits.argmax(-1) == batch.target_ids).sum()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_same_weights_same_outputs_in_fp32(lengths: tuple[list[int], list[int]]) -> None:
    ours, theirs = models(torch.float32, "theirs_to_ours")
    with torch.no_grad():
        assert_same(ours, theirs, noisy(*lengths))


@settings(max_examples=12, deadline=None)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    width=st.integers(1, 8),
    inner=st.integers(1, 40),
    vocab=st.integers(20, 60),
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=4),
)
def test_any_shape_and_any_rows_in_fp64(
    layers: int, heads: int, width: int, inner: int, vocab: int, lengths: list[tuple[int, int]]
) -> None:
    config = BartConfig(
        layers=layers,
        hidden=width * heads,
        heads=heads,
        feed_forward=inner,
        vocab=vocab,
        max_length=64,
    )
    ours, theirs = models(torch.float64, "theirs_to_ours", config)
    written, read = [list(each) for each in zip(*lengths, strict=True)]
    with torch.no_grad():
        assert_same(ours, theirs, noisy(written, read, vocab))


def test_same_gradients_in_fp64() -> None:
    ours, theirs = models(torch.float64, "ours_to_theirs")
    batch = noisy([5, 40, 17], [7, 31, 12])
    assert batch.corrupted is not None
    read, written = pad(batch.corrupted, 1), pad(batch, 1)
    logits = theirs(read.input_ids, attention_mask=read.attention_mask, labels=written.labels).logits
    expected = F.cross_entropy(written.flat(logits), batch.target_ids)
    assert_same_gradients(ours, theirs, hf_format_of(CONFIG, "denoise"), mean_loss(ours(batch)), expected)


def test_an_export_is_loaded_by_transformers(tmp_path: Path) -> None:
    """By its automatic class, with nothing missing."""
    ours = random_weights(DenoiseConfig().build(CONFIG)).eval()
    parameters = parameters_of(ours)
    export_model(parameters.__getitem__, CONFIG, {}, open_store(str(tmp_path / "out")), "denoise")
    theirs, report = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, decoder_start_token_id=END
    )
    assert isinstance(theirs, BartForConditionalGeneration)
    assert not any(report.values())
    with torch.no_grad():
        assert_same(ours, theirs.eval(), noisy(*LENGTHS[1]))


def test_a_saved_folder_is_read(tmp_path: Path) -> None:
    _, theirs = models(torch.float32, "theirs_to_ours")
    theirs.save_pretrained(tmp_path)
    read = load_pretrained(tmp_path, "denoise")
    assert read.config == CONFIG
    ours = DenoiseConfig().build(CONFIG)
    assert parameters_of(ours).keys() == read.tensors.keys()
    ours.load_state_dict(read.tensors, strict=False)
    with torch.no_grad():
        assert_same(ours.eval(), theirs, noisy(*LENGTHS[1]))


def test_a_bias_of_the_output_is_refused(tmp_path: Path) -> None:
    _, theirs = models(torch.float32, "theirs_to_ours")
    bias: Tensor = theirs.final_logits_bias
    bias[0, 7] = 0.5
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="final_logits_bias"):
        load_pretrained(tmp_path, "denoise")


@pytest.mark.parametrize(
    "change",
    [{"scale_embedding": True}, {"normalize_before": True}, {"decoder_layers": 2}, {"decoder_ffn_dim": 9}],
    ids=str,
)
def test_what_is_no_bart_is_refused(change: dict[str, Any]) -> None:
    fields = hf_format_of(CONFIG, "denoise").fields
    with pytest.raises(ModelError, match=next(iter(change))):
        read_config(fields | change)


def test_rows_without_forms_are_refused() -> None:
    ours = random_weights(DenoiseConfig().build(CONFIG))
    with pytest.raises(TrainingError):
        ours(replace(noisy([4], [4]), corrupted=None))
