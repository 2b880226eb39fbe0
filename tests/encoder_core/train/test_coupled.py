"""The loss and the gradient of a contrastive step, alone and beside other terms, depend neither on ranks nor on
microbatches. At every ZeRO stage: test_families.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_core.batch import duplicate_rows
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.modules.info_nce import CHUNK_SIMILARITIES
from encoder_core.objectives.modules.text_vectors import WithVectors
from encoder_core.objectives.term import last_weight
from encoder_core.train.step import seed_draws
from tests.support.ranks import contrastive
from tests.support.ranks.contrastive import EXAMPLES, SEED, Case
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.fragments import kind_of

pytestmark = pytest.mark.cluster

FORMS = (
    (ContrastiveConfig(), 2),
    (ContrastiveConfig(temperature=0.5, pooling="cls", normalize=False, projection=True), 2),
    (ContrastiveConfig(temperature=0.5, bidirectional=True, matryoshka=(16, 8, 3)), 4),
)
TIED = ContrastiveConfig(temperature=0.5, projection=True, bidirectional=True, weight=3.0)
# Microbatches of 5 leave a smaller one at the end, those of 16 a rank of three without work.
SOME = [Case(5, *FORMS[2]), *(Case(5, TIED, beside=name) for name in ("mlm", "sop", "rtd"))]
ALL = [
    *(Case(size, *form) for form in FORMS for size in (4, 5, 8, 16)),
    *(Case(size, TIED, beside=name) for name in ("mlm", "sop", "rtd") for size in (7, 16)),
]


def one_big_batch(case: Case) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """By plain autograd: one forward pass of all texts, and cross-entropy over all similarities. Means of losses by
    term, and the gradient by parameter."""
    model, batch = contrastive.fresh_model(case).double(), case.rows(0, EXAMPLES)
    seed_draws(SEED, 0, 0)
    vectors = model.embed(batch)
    vectors_of = model.vectors if isinstance(model, WithVectors) else model
    others = model.others.forward(model, batch).terms if isinstance(model, WithVectors) else ()
    losses = {term.name: (term.loss_sum / term.targets, term.weight) for term in others}
    for name, width in vectors_of.terms.items():
        losses[name] = (_loss(case, vectors[..., :width]), last_weight(case.objective.weight))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    whole = torch.stack([weight * loss for loss, weight in losses.values()]).sum()
    gradients = torch.autograd.grad(whole, [p for _, p in named])
    return (
        {name: loss.item() for name, (loss, _) in losses.items()},
        {name: g.flatten().numpy() for (name, _), g in zip(named, gradients, strict=True)},
    )


def _loss(case: Case, vectors: Tensor) -> Tensor:
    config = case.objective
    vectors = F.normalize(vectors, dim=-1) if config.normalize else vectors
    queries, positives, others = vectors[:, 0], vectors[:, 1], vectors[:, 2:].flatten(0, 1)
    own = torch.arange(EXAMPLES)
    scores = queries @ torch.cat([positives, others]).T / config.temperature
    scores = scores.masked_fill(_no_negatives(case), -torch.inf)
    there, back = F.cross_entropy(scores, own), F.cross_entropy(scores[:, :EXAMPLES].T, own)
    return (there + back) / 2 if config.bidirectional else there


def _no_negatives(case: Case) -> Tensor:
    """Which candidates, positives first, are no negatives of which query: equal texts, and positives of equal
    queries."""
    examples = contrastive.examples(case.group)
    if case.beside != "nothing":
        examples = [[example[0]] * 2 for example in examples]
    texts = [[tuple(text.tolist()) for text in example] for example in examples]
    candidates = [(e[1], e[0], j) for j, e in enumerate(texts)] + [(c, None, -1) for e in texts for c in e[2:]]
    return torch.tensor(
        [[j != i and (c in e[:2] or e[0] == asked) for c, asked, j in candidates] for i, e in enumerate(texts)]
    )


@pytest.mark.parametrize(
    ("world", "cases"),
    [(2, SOME), *(pytest.param(world, ALL, marks=pytest.mark.long) for world in (1, 2, 3))],
)
def test_the_step_is_that_of_one_big_batch_in_double_precision(world: int, cases: list[Case]) -> None:
    """And so are the held-out figures, where no dropout makes them others."""
    for case, *ranks in zip(cases, *run_ranks(contrastive.first_steps, world, cases), strict=True):
        losses, expected = one_big_batch(case)
        for rank in ranks:
            found = kind_of([rank.gradient], "gradient")
            assert found.keys() == expected.keys()
            error = sum(np.square(found[name] - values).sum() for name, values in expected.items())
            assert error < 1e-20 * sum(np.square(values).sum() for values in expected.values()), case
            for name, loss in losses.items():
                mean = rank.sums[f"{name}_loss"] / rank.sums[f"{name}_targets"]
                assert mean == pytest.approx(loss, rel=1e-9), (case, name)
                if case.beside == "nothing":
                    assert rank.sums[f"{name}_targets"] == rank.heldout[f"{name}_targets"] == EXAMPLES
                    assert rank.heldout[f"{name}_loss"] == pytest.approx(loss, rel=1e-9), (case, name)


def test_the_examples_of_these_tests_share_texts() -> None:
    assert _no_negatives(Case(8)).sum() >= EXAMPLES // 2


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


def test_a_row_is_read_twice_as_its_text_was() -> None:
    batch = Case(6, beside="mlm").rows(3, 9)
    text = batch.tokens.index_copy(0, batch.target_positions, batch.target_ids)
    both = duplicate_rows(batch)
    assert both.group == 2
    assert both.numbers is not None
    assert both.numbers.tolist() == list(range(6, 18))
    expected = [part for row in text.split(batch.cu_seqlens.diff().tolist()) for part in (row, row)]
    for found, row in zip(both.tokens.split(both.cu_seqlens.diff().tolist()), expected, strict=True):
        assert torch.equal(found, row)
    assert not torch.equal(both.random_keys.unique(), batch.random_keys.unique())
    none = {name: value[:0] for name, value in vars(batch).items() if name in EMPTY}
    empty = duplicate_rows(replace(batch, **none, cu_seqlens=batch.cu_seqlens[:1]))
    assert (empty.rows, len(empty.tokens)) == (0, 0)


EMPTY = ("tokens", "positions", "target_positions", "target_ids", "segments", "pair_labels", "numbers")
