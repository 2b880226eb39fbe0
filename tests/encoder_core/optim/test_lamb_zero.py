"""LAMB's trust ratios under real ZeRO 0-3 equal the unsharded optimizer's."""

import numpy as np
import pytest

from encoder_core.train.zero_state import MASTER
from tests.support.ranks import lamb
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.fragments import kind_of


@pytest.mark.cluster
def test_ten_steps_at_every_stage_equal_the_unsharded_optimizer() -> None:
    expected = lamb.unsharded()
    ranks = run_ranks(lamb.sharded, 2, [0, 1, 2, 3])
    for stage in range(4):
        found = kind_of((rank[stage] for rank in ranks), MASTER)
        assert found.keys() == expected.keys()
        for name, weights in expected.items():
            error = np.abs(found[name] - weights).max() / np.abs(weights).max()
            assert error <= 1e-6, f"stage {stage}, {name}: {error}"
