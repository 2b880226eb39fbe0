"""The average of weights at every ZeRO stage: NumPy's formula bit for bit, updates that are skipped left out; and its
evaluation. On other ranks and stages along the way, and beside a run without one: determinism/test_average.py."""

import numpy as np
import pytest

from encoder_core.train.zero_state import MASTER
from tests.support.ranks import averages
from tests.support.ranks.averages import Averaged
from tests.support.ranks.forked import run_cases
from tests.support.ranks.fragments import whole
from tests.support.ranks.small_training import Setting

pytestmark = pytest.mark.cluster

DECAY = 0.9
SETTINGS = [Setting(stage, decay=DECAY) for stage in (0, 1, 2, 3)]
SETTINGS += [Setting(stage, "bf16", decay=DECAY) for stage in (1, 2, 3)]
STEPS, POISONED = 3, 1


def by_numpy(trained: Averaged) -> dict[str, np.ndarray]:
    """The definition: after each update that was applied, in float32."""
    d = np.float32(DECAY)
    average = {name: kinds[MASTER] for name, kinds in trained.weights[0].items()}
    for weights, applied in zip(trained.weights[1:], trained.applied, strict=True):
        for name in average if applied else ():
            average[name] = d * average[name] + (np.float32(1) - d) * weights[name][MASTER]
    return average


def test_it_is_numpys_at_every_stage_skips_what_was_skipped_and_is_evaluated() -> None:
    """Two ranks, an evaluation after each step; one update is dropped."""
    for ranks in run_cases(averages.train, 2, SETTINGS, STEPS, POISONED):
        assert ranks[0].applied == [True, False, True]
        found = whole((rank.state for rank in ranks), ranks[0].shapes)
        expected = by_numpy(ranks[0])
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name]["average"].tobytes() == values.tobytes(), name
        assert any((kinds["average"] != kinds[MASTER]).any() for kinds in found.values())
        for rank in ranks:
            assert rank.figures["average_mlm_loss"] == rank.loss_of_average != rank.figures["mlm_loss"]
            assert {n for n in rank.figures if n.startswith("average_")} == {
                "average_mlm_loss",
                "average_mlm_accuracy",
            }
