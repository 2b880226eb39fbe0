"""The loss and the gradient of a contrastive step do not depend on ranks, microbatches or ZeRO stages."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_core.families.albert import AlbertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.modules.info_nce import CHUNK_SIMILARITIES
from tests.support.ranks import contrastive
from tests.support.ranks.contrastive import EXAMPLES, Case, Outcome
from tests.support.ranks.forked import run_ranks

pytestmark = pytest.mark.cluster

FORMS = (
    (ContrastiveConfig(), 2),
    (ContrastiveConfig(temperature=0.5, pooling="cls", normalize=False, projection=True), 2),
    (ContrastiveConfig(temperature=0.5, bidirectional=True, matryoshka=(16, 8, 3)), 4),
)


SHAPE = contrastive.BERT.model_dump(exclude={"family", "token_types", "position", "layer_norm_eps"})
FAMILIES: tuple[ModelConfig, ...] = (
    RobertaConfig(**SHAPE),
    AlbertConfig(**SHAPE, embedding=8),
    ElectraConfig(**SHAPE, embedding=8),
    DebertaConfig(**SHAPE),
    DebertaV2Config(**SHAPE, buckets=8),
    XlnetConfig(**SHAPE),
    ModernBertConfig(**SHAPE, local_attention=8),
    EuroBertConfig(**SHAPE),
)


def one_big_batch(case: Case) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradient by plain autograd: one forward pass of all texts, and cross-entropy over all similarities."""
    model = contrastive.fresh_model(case)
    if case.double:
        model.double()
    vectors = model.embed(contrastive.to_rows(contrastive.examples(case.group)))
    loss = torch.stack([_loss(vectors[..., :width], case.objective) for width in model.terms.values()]).sum()
    named = contrastive.named(model)
    gradients = torch.autograd.grad(loss, [p for _, p in named])
    return loss.item(), {name: g.flatten().numpy() for (name, _), g in zip(named, gradients, strict=True)}


def _loss(vectors: Tensor, config: ContrastiveConfig) -> Tensor:
    vectors = F.normalize(vectors, dim=-1) if config.normalize else vectors
    queries, positives, others = vectors[:, 0], vectors[:, 1], vectors[:, 2:].flatten(0, 1)
    own = torch.arange(EXAMPLES)
    scores = queries @ torch.cat([positives, others]).T / config.temperature
    scores = scores.masked_fill(_no_negatives(vectors.shape[1]), -torch.inf)
    there, back = F.cross_entropy(scores, own), F.cross_entropy(scores[:, :EXAMPLES].T, own)
    return (there + back) / 2 if config.bidirectional else there


def _no_negatives(group: int) -> Tensor:
    """Which candidates, positives first, are no negatives of which query: equal texts, and positives of equal
    queries."""
    texts = [[tuple(text.tolist()) for text in example] for example in contrastive.examples(group)]
    candidates = [(e[1], e[0], j) for j, e in enumerate(texts)] + [
        (c, None, -1) for e in texts for c in e[2:]
    ]
    return torch.tensor(
        [
            [j != i and (c in e[:2] or e[0] == asked) for c, asked, j in candidates]
            for i, e in enumerate(texts)
        ]
    )


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The error's norm over the gradient's."""
    assert found.keys() == expected.keys()
    error, size = (
        np.concatenate([a.ravel() for a in parts])
        for parts in zip(*((found[name] - values, values) for name, values in expected.items()), strict=True)
    )
    return float(np.linalg.norm(error) / np.linalg.norm(size))


def losses(outcome: Outcome) -> float:
    return sum(value for name, value in outcome.sums.items() if name.endswith("_loss")) / EXAMPLES


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_gradient_is_that_of_one_big_batch_in_double_precision(world: int) -> None:
    """Microbatches of 5 leave a smaller one at the end, and of 16 a rank of three without work."""
    cases = [
        Case(microbatch, objective, group, double=True)
        for objective, group in FORMS
        for microbatch in (4, 5, 8, 16)
    ]
    for case, *ranks in zip(cases, *run_ranks(contrastive.first_steps, world, cases), strict=True):
        loss, gradient = one_big_batch(case)
        for rank in ranks:  # at stage 0 each has all of it
            assert abs(losses(rank) - loss) < 1e-10, case
            assert distance(contrastive.assemble([rank]), gradient) < 1e-10, case


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_zero_stage_has_the_same_gradient_and_the_same_held_out_figures(world: int) -> None:
    """In fp32, through the engine; the held-out rows are those of the step, so their loss is the step's."""
    cases = [Case(8, *FORMS[2], stage=stage) for stage in (0, 1, 2, 3)]
    for case, *ranks in zip(cases, *run_ranks(contrastive.first_steps, world, cases), strict=True):
        loss, gradient = one_big_batch(replace(case, double=True))
        assert distance(contrastive.assemble(ranks[:1] if case.stage == 0 else ranks), gradient) < 1e-6, case
        for rank in ranks:
            assert abs(losses(rank) - loss) < 1e-6 * loss, case
            assert abs(rank.heldout["loss"] - loss) < 1e-6 * loss, case
            assert rank.heldout["contrastive_8_targets"] == EXAMPLES


@pytest.mark.long
def test_every_family_has_the_gradient_of_one_big_batch() -> None:
    """At stage 3 on two ranks of which one idles at the end; XLNet's mask vector is frozen and has no gradient."""
    cases = [Case(12, ContrastiveConfig(temperature=0.5), stage=3, model=model) for model in FAMILIES]
    for case, *ranks in zip(cases, *run_ranks(contrastive.first_steps, 2, cases), strict=True):
        _, gradient = one_big_batch(replace(case, double=True))
        found = contrastive.assemble(ranks)
        found = {name: values for name, values in found.items() if name != "encoder.mask.weight"}
        assert distance(found, gradient) < 1e-6, case.model.family


def test_the_examples_of_these_tests_share_texts() -> None:
    assert _no_negatives(2).sum() >= EXAMPLES // 2


@pytest.mark.long
def test_both_passes_draw_the_same_dropout() -> None:
    """Every text is the same one here, and each has draws of its own."""
    for ranks in run_ranks(contrastive.both_passes, 2, list(FAMILIES)):
        assert ranks == [True] * len(FAMILIES)


@pytest.mark.long
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_vector_that_is_not_finite_leaves_the_weights_alone(broken: float) -> None:
    """Whichever rank has it: the loss and the gradient are not finite on all of them, and no update is made."""
    ranks = run_ranks(contrastive.broken_step, 2, broken)
    assert ranks == [(False, False)] * 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_memory_is_flat_in_the_batch() -> None:
    """Peak over what the process had before, with microbatches of 16 pairs; and of a batch that is one microbatch."""
    peaks = {pairs: run_ranks(contrastive.peak_of_step, 1, pairs, 16)[0] for pairs in (64, 512, 4096)}
    whole = run_ranks(contrastive.peak_of_step, 1, 128, 128)[0]
    for pairs, peak in peaks.items():
        print(f"{pairs:,} pairs in microbatches of 16: {peak / 1e6:.0f} MB")
    print(f"128 pairs in one microbatch: {whole / 1e6:.0f} MB")
    vectors = 4096 * 2 * contrastive.WIDE.hidden * 4
    assert peaks[512] < 1.15 * peaks[64]
    assert peaks[4096] < 1.15 * peaks[64] + 8 * vectors + 4 * 4 * CHUNK_SIMILARITIES
    assert whole > 4 * peaks[64]
