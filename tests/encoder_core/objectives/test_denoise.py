"""Denoising as the trainer sees it: the literal formula, rows of the data service, refusals."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from data_service.rng import stream_key
from data_service.samples.denoising import Denoising
from data_service.samples.make import make_rows
from data_service.samples.packing import pack_block
from data_service.samples.samples import Samples, slice_rows
from data_service.samples.spec import SourceSpec
from encoder_core.batch import Batch, select_rows
from encoder_core.errors import ModelError
from encoder_core.families.bart import BartConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.clm import ClmConfig
from encoder_core.objectives.compose import compose
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.denoise import DenoiseConfig
from encoder_core.objectives.diffusion import DiffusionConfig
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.denoising import DenoisingModel
from encoder_core.objectives.plm import PlmConfig
from encoder_core.objectives.term import RowFacts, TermConfig, TermSetting
from launcher.runtime.rank.collate import to_batch
from tests.support.data.corpora import SPECIAL, VOCABULARY, random_block, spec_of
from tests.support.models.parity import random_weights

SIZE: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "feed_forward": 32, "vocab": VOCABULARY}
CONFIG = BartConfig(**SIZE, max_length=32)
CPU = torch.device("cpu")


def samples(rows: int = 5) -> Samples:
    block = random_block(seed=3, tokens=400, sentence=5)
    source = SourceSpec(name="text", uri="nowhere", manifest_fingerprint="f" * 64)
    spec = spec_of(source, masking=Denoising(), input={"packing": "full_sentences"})
    cuts = pack_block(block, "full_sentences", spec.length)
    return make_rows(block, cuts, 0, rows, spec, stream_key("denoise"))


def built() -> DenoisingModel:
    return random_weights(DenoiseConfig().build(CONFIG)).double().eval()


def form(batch: Batch) -> Batch:
    assert batch.corrupted is not None
    return batch.corrupted


@pytest.mark.long
@torch.no_grad()
def test_sums_are_the_literal_formula() -> None:
    """Row by row and token by token, each prefix alone: behind </s> come the tokens before, and no later one."""
    model, batch = built(), to_batch(samples(), CPU)
    expected, correct = torch.zeros((), dtype=torch.float64), 0
    for row in range(batch.rows):
        alone = select_rows(batch, torch.tensor([row]))
        tokens = alone.tokens.tolist()
        read = model.encoder(form(alone))
        for place, token in enumerate(tokens):
            prefix = [*tokens[:place], SPECIAL.sep]  # whose last token becomes the first
            shorter = replace(
                alone,
                tokens=torch.tensor(prefix),
                positions=torch.arange(place + 1),
                cu_seqlens=torch.tensor([0, place + 1], dtype=torch.int32),
                max_length=place + 1,
            )
            state = model.decoder(shorter, read, form(alone))[-1]
            log_p = (state @ model.encoder.embeddings.word.weight.t()).log_softmax(-1)
            expected -= log_p[token]
            correct += int(log_p.argmax()) == token
    found = model(batch)
    (term,) = found.terms
    assert term.name == "denoise"
    assert term.targets == model.target_counts(batch)["denoise"] == len(batch.tokens)
    torch.testing.assert_close(term.loss_sum, expected, rtol=1e-10, atol=1e-10)
    assert found.metrics["denoise_correct"] == correct


def test_a_batch_has_the_rows_and_their_forms() -> None:
    rows = samples()
    batch = to_batch(rows, CPU, first_number=7)
    assert batch.causal
    assert not form(batch).causal
    np.testing.assert_array_equal(form(batch).tokens, rows.corrupted)
    np.testing.assert_array_equal(form(batch).cu_seqlens, rows.corrupted_offsets)
    assert form(batch).numbers is not None
    assert form(batch).numbers.tolist() == batch.numbers.tolist() == [7, 8, 9, 10, 11]  # type: ignore[union-attr]
    moved = batch.to(torch.device("meta"))
    assert form(moved).tokens.device.type == "meta"
    some = select_rows(batch, torch.tensor([1, 4]))
    for place, row in enumerate((1, 4)):
        expected = to_batch(slice_rows(rows, row, row + 1), CPU)
        found = select_rows(some, torch.tensor([place]))
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(form(found).tokens, form(expected).tokens)
        assert torch.equal(form(found).positions, form(expected).positions)


@pytest.mark.parametrize(
    "terms",
    [
        [MlmConfig()],
        [ClmConfig()],
        [DiffusionConfig()],
        [PlmConfig()],
        [ContrastiveConfig()],
        [DenoiseConfig(), MlmConfig()],
    ],
    ids=lambda terms: "+".join(term.name for term in terms),
)
def test_a_bart_is_trained_by_denoising_alone(terms: list[TermConfig]) -> None:
    with pytest.raises(ModelError):
        compose(CONFIG, {term.name: term for term in terms})


def test_an_encoder_alone_is_not_trained_by_denoising() -> None:
    with pytest.raises(ModelError, match="decoder"):
        compose(RobertaConfig(**SIZE), {"denoise": DenoiseConfig()})


def test_rows_of_two_segments_are_refused() -> None:
    term = DenoiseConfig()
    facts = RowFacts("segment_pair", packed=False)
    (found,) = term.refusals(TermSetting(CONFIG, {"denoise": term}, facts))
    assert found.path == ("input", "packing")
