"""What stays on a GPU by ZeRO stage: the formulas against what two ranks of a live engine hold."""

from typing import Literal

import pytest

from encoder_core.train.settings import Precision
from encoder_core.train.zero_memory import MemoryPart, average_memory, fixed_memory, total_bytes
from tests.support.ranks import measures
from tests.support.ranks.forked import run_ranks

pytestmark = pytest.mark.cluster

WORLD = 2
COUNT = measures.WIDTH**2 * measures.DEPTH
PASSING = (
    "gathered weights",
    "bucket of gradients",
    "2 buckets of gradients",
)  # there only in a forward or backward pass
LARGE = 16_000_000  # bytes: a bucket, whatever the model's size


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        pytest.param(0, "fp32", marks=pytest.mark.long),
        pytest.param(1, "fp32", marks=pytest.mark.long),
        (2, "fp32"),
        pytest.param(3, "fp32", marks=pytest.mark.long),
        (1, "bf16"),
        pytest.param(2, "bf16", marks=pytest.mark.long),
        (3, "bf16"),
    ],
)
def test_weights_gradients_and_moments_are_as_large_as_the_formulas_say(
    stage: Literal[0, 1, 2, 3], precision: Precision
) -> None:
    ensure_held(fixed_memory(COUNT, WORLD, stage, precision), stage, precision)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_of_a_matrix_muon_keeps_one_moment(stage: Literal[0, 1, 2, 3], precision: Precision) -> None:
    ensure_held(fixed_memory(COUNT, WORLD, stage, precision, one_moment=COUNT), stage, precision, muon=True)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (0, "fp32"), (2, "fp32"), (3, "bf16")])
def test_an_average_is_sharded_as_master_weights_are(stage: Literal[0, 1, 2, 3], precision: Precision) -> None:
    parts = [*fixed_memory(COUNT, WORLD, stage, precision), average_memory(COUNT, WORLD, stage)]
    ensure_held(parts, stage, precision, decay=0.99)


def ensure_held(
    parts: list[MemoryPart],
    stage: Literal[0, 1, 2, 3],
    precision: Precision,
    *,
    muon: bool = False,
    decay: float | None = None,
) -> None:
    staying = total_bytes(part for part in parts if not part.what.startswith(PASSING))
    for found in run_ranks(measures.state_bytes, WORLD, (stage, precision), LARGE, muon, decay):
        assert found == pytest.approx(staying, rel=0.001)
