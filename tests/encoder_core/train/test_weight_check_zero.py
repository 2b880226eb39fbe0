"""At ZeRO 0 to 2 every weight is compared, in either precision; at 3 none is, for none is there twice."""

import pytest

from tests.support.ranks.forked import run_ranks
from tests.support.ranks.replicas import DAMAGED, look
from tests.support.ranks.small_training import Setting

pytestmark = pytest.mark.cluster

SETTINGS = [Setting(0), Setting(1), Setting(2), Setting(1, "bf16"), Setting(2, "bf16"), Setting(3)]


@pytest.mark.long
def test_no_weight_can_change_unnoticed() -> None:
    ranks = run_ranks(look, 3, SETTINGS)
    for rank in ranks:
        *twice, sharded = rank
        for setting, found in zip(SETTINGS, twice, strict=False):
            assert found.well, setting
            assert len(found.named) > 30
            assert found.missed == [], setting
            assert found.blamed == {(DAMAGED,)}, setting
            assert found.right, setting
        assert sharded.named == []
        assert sharded.well
