"""DeBERTa with its mask decoder and XLNet train the same under real ZeRO as in plain PyTorch."""

import numpy as np
import pytest

from tests.support.ranks import families
from tests.support.ranks.forked import run_ranks


@pytest.mark.cluster
@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_equal_one_process(stage: int) -> None:
    ranks = run_ranks(families.sharded, 2, stage)
    for family in families.FAMILIES:
        expected = families.alone(family)
        found = {name: np.full_like(values, np.nan) for name, values in expected.items()}
        for fragments in ranks:
            for name, start, values in fragments[family]:
                found[name][start : start + len(values)] = values
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-5, err_msg=f"{family} {name}")
