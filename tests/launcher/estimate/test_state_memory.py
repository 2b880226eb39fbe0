"""What stays on a GPU by ZeRO stage: the formulas against what two ranks of a live engine hold."""

import pytest
import state_ranks
from ranks import run_ranks

from launcher.estimate.memory import kept, total

pytestmark = pytest.mark.cluster

WORLD = 2
SETTINGS: list[state_ranks.Setting] = [
    (0, "fp32"),
    *((stage, precision) for precision in ("fp32", "bf16") for stage in (1, 2, 3)),
]
PASSING = ("gathered weights", "bucket of gradients")  # there only in a forward or backward pass
LARGE = 900_000_000  # bytes: a bucket, whatever the model's size


def test_weights_gradients_and_moments_are_as_large_as_the_formulas_say() -> None:
    for measured in run_ranks(state_ranks.state_bytes, WORLD, SETTINGS, LARGE):
        for (stage, precision), found in zip(SETTINGS, measured, strict=True):
            parts = kept(state_ranks.WIDTH**2 * state_ranks.DEPTH, WORLD, stage, precision)
            staying = total(part for part in parts if not part.what.startswith(PASSING))
            assert found == pytest.approx(staying, rel=0.001), (stage, precision)
