"""Contrastive training beside other terms: the step's loss and gradient are those of one big batch, whatever the ranks,
microbatches and ZeRO stages."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_core.batch import duplicate_rows
from encoder_core.objectives.term import last_weight
from encoder_core.train.step import seed_draws
from tests.support.ranks import contrastive_beside
from tests.support.ranks.contrastive import SEED, Outcome
from tests.support.ranks.contrastive_beside import CONTRAST, ROWS, SETS, Case, rows
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.fragments import kind_of

pytestmark = pytest.mark.cluster

STAGES = [Case("rtd", 5, stage=stage) for stage in (1, 2, 3)]


def one_big_batch(terms: str) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """In fp64, by plain autograd: means of losses by name, and the gradient by parameter."""
    model, batch = contrastive_beside.fresh_model(terms).double(), rows(0, ROWS)
    seed_draws(SEED, 0, 0)
    vectors = model.embed(batch)
    others = model.others.forward(model, batch)
    losses = {term.name: term.loss_sum / term.targets for term in others.terms}
    losses["contrastive"] = info_nce(*F.normalize(vectors, dim=-1).unbind(1))
    weights = {term.name: term.weight for term in others.terms} | {"contrastive": CONTRAST.weight}
    named = list(model.named_parameters())
    whole = torch.stack([last_weight(weights[name]) * loss for name, loss in losses.items()]).sum()
    gradients = torch.autograd.grad(whole, [p for _, p in named])
    return (
        {name: loss.item() for name, loss in losses.items()},
        {name: g.flatten().numpy() for (name, _), g in zip(named, gradients, strict=True)},
    )


def info_nce(a: Tensor, b: Tensor) -> Tensor:
    scores, own = a @ b.T / CONTRAST.temperature, torch.arange(len(a))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def ensure_same(case: Case, ranks: list[Outcome], tolerance: float) -> None:
    losses, expected = one_big_batch(case.terms)
    found = kind_of((rank.gradient for rank in (ranks if case.stage else ranks[:1])), "gradient")
    assert found.keys() == expected.keys()
    wanted = contrastive_beside.concatenated(expected)
    error = np.linalg.norm(contrastive_beside.concatenated(found) - wanted) / np.linalg.norm(wanted)
    assert error < tolerance, case
    for rank in ranks:
        for name, loss in losses.items():
            mean = rank.sums[f"{name}_loss"] / rank.sums[f"{name}_targets"]
            assert mean == pytest.approx(loss, rel=10 * tolerance), (case, name)
        assert rank.sums["contrastive_targets"] == ROWS


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
def test_the_step_is_that_of_one_big_batch_in_double_precision(world: int) -> None:
    """With dropout, which makes the two vectors of a row differ; microbatches of 5 leave a smaller one at the end, and
    of 12 a rank of three without work."""
    cases = [Case(terms, size, double=True) for terms in SETS for size in ((5,) if world == 2 else (7, 12))]
    for case, *ranks in zip(cases, *run_ranks(contrastive_beside.steps, world, cases), strict=True):
        ensure_same(case, ranks, 1e-10)


@pytest.mark.long
def test_every_zero_stage_makes_the_same_step_and_the_same_held_out_figures() -> None:
    found = run_ranks(contrastive_beside.steps, 2, STAGES)
    for case, *ranks in zip(STAGES, *found, strict=True):
        ensure_same(case, ranks, 1e-5)
    (alone,) = run_ranks(contrastive_beside.steps, 1, [Case("rtd", ROWS)])
    for outcome in [outcome for rank in found for outcome in rank]:
        assert (
            outcome.heldout.keys() == alone[0].heldout.keys() >= {"mlm_loss", "rtd_loss", "contrastive_loss"}
        )
        for name, value in alone[0].heldout.items():
            assert outcome.heldout[name] == pytest.approx(value, rel=1e-5), name


def test_a_row_is_read_twice_as_its_text_was() -> None:
    batch = rows(3, 9)
    text = batch.tokens.index_copy(0, batch.target_positions, batch.target_ids)
    both = duplicate_rows(batch)
    assert both.group == 2
    assert both.numbers is not None
    assert both.numbers.tolist() == list(range(6, 18))
    expected = [part for row in text.split(batch.cu_seqlens.diff().tolist()) for part in (row, row)]
    for found, row in zip(both.tokens.split(both.cu_seqlens.diff().tolist()), expected, strict=True):
        assert torch.equal(found, row)
    assert not torch.equal(both.keys.unique(), batch.keys.unique())
    none = {name: value[:0] for name, value in vars(batch).items() if name in EMPTY}
    empty = duplicate_rows(replace(batch, **none, cu_seqlens=batch.cu_seqlens[:1]))
    assert (empty.rows, len(empty.tokens)) == (0, 0)


EMPTY = ("tokens", "positions", "target_positions", "target_ids", "segments", "pair_labels", "numbers")
