"""ALBERT, whose layers are one, DeBERTa with its mask decoder, ModernBERT, EuroBERT, XLM and XLNet train under real
ZeRO as in plain PyTorch."""

import numpy as np
import pytest

from encoder_core.train.zero_state import MASTER
from tests.support.ranks import families
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.fragments import kind_of


@pytest.mark.default_cases(1)
@pytest.mark.cluster
@pytest.mark.parametrize(("stage", "compiled"), [(2, False), (3, False), (3, True)])
def test_two_ranks_equal_one_process(stage: int, compiled: bool) -> None:
    """Stage 3 gathers a compiled layer as a whole."""
    ranks = run_ranks(families.sharded, 2, stage, compiled)
    for family in families.FAMILIES:
        expected = families.alone(family)
        found = kind_of((rank[family] for rank in ranks), MASTER)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-5, err_msg=f"{family} {name}")
