"""Each family's step and transformers' compute the same loss, and the program measures and prints both."""

from typing import get_args

import pytest
import step
import torch
from step import Family, Setting, bench_step, render
from step_batch import (
    IGNORED,
    Lengths,
    Permuted,
    Rectangle,
    in_random_order,
    make_batch,
    row_lengths,
)

from encoder_core.families.electra import ElectraConfig

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "feed_forward": 48, "vocab": 101}


def tiny(family: Family, lengths: Lengths) -> Setting:
    config = step.BASE[family].model_copy(update=SHAPE)
    if isinstance(config, ElectraConfig):
        config = config.model_copy(update={"embedding": 16, "generator_divisor": 2})
    return Setting(
        family, config, rows=3, length=40, lengths=lengths, rounds=1, threads=torch.get_num_threads()
    )


@pytest.mark.parametrize("lengths", get_args(Lengths))
@pytest.mark.parametrize("family", get_args(Family))
def test_both_sides_compute_the_same_loss(family: Family, lengths: Lengths) -> None:
    result = bench_step(tiny(family, lengths), progress=lambda _: None)
    assert result.loss_gap < 1e-5
    assert result.tokens == sum(row_lengths(lengths, 3, 40))
    assert (result.peer_masked is None) == (family == "xlnet")
    text = render(result)
    assert family in text
    assert f"{result.ratio:.2f} x" in text


def test_mixed_rows_reach_the_longest() -> None:
    assert row_lengths("mixed", 4, 128) == [128, 91, 54, 16]
    assert row_lengths("full", 2, 128) == [128, 128]


def test_a_rectangle_holds_the_flat_batch() -> None:
    batch = make_batch([5, 9], 101)
    rectangle = Rectangle.of(batch, pad_id=0)
    assert torch.equal(rectangle.tokens[rectangle.mask.bool()], batch.tokens)
    assert torch.equal(rectangle.tokens.flatten()[rectangle.at], batch.tokens)
    assert not rectangle.tokens[~rectangle.mask.bool()].any()
    labels = rectangle.labels.flatten()[rectangle.at]
    assert torch.equal((labels != IGNORED).nonzero().flatten(), batch.target_positions)


def test_spans_are_runs_of_up_to_ten_targets() -> None:
    at = make_batch([5120], 101, spans=True).target_positions
    runs = at.tensor_split((at.diff() > 1).nonzero().flatten() + 1)
    assert {len(run) for run in runs} == set(range(1, 11))
    assert len(at) / 5120 == pytest.approx(0.15, abs=0.02)


def test_a_target_of_the_peer_does_not_see_itself() -> None:
    batch = in_random_order(make_batch([6, 20], 101))
    permuted = Permuted.of(batch)
    row, target, at = permuted.mapping.nonzero().T
    assert len(at) == len(batch.target_positions)
    assert permuted.hidden[row, at, at].all()
    assert torch.equal(permuted.labels[row, target], batch.target_ids)
