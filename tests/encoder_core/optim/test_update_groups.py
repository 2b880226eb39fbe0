"""What every optimizer does with its groups: each update moves the parameters of its own update group and nothing of
the others, and a partition that nobody described is an error."""

from typing import Any

import pytest
import torch
from torch import nn

from encoder_core.errors import TrainingError
from encoder_core.optim.adamw import AdamW, StableAdamW
from encoder_core.optim.lamb import Lamb
from encoder_core.optim.muon import Muon
from encoder_core.optim.settings import AdamWConfig, LambConfig, MuonConfig, StableAdamWConfig
from encoder_core.optim.updates import set_update


def optimizer_of(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = {
        "AdamW": lambda: AdamW(groups, AdamWConfig(lr=0.1)),
        "StableAdamW": lambda: StableAdamW(groups, StableAdamWConfig(lr=0.1)),
        "Lamb": lambda: Lamb(groups, LambConfig(lr=0.1)),
        "Muon": lambda: Muon(groups, MuonConfig(lr=0.1)),
    }[name]()
    return made


@pytest.mark.parametrize("name", ["AdamW", "StableAdamW", "Lamb", "Muon"])
def test_other_update_groups_are_left_alone(name: str) -> None:
    """Though they have a gradient and would decay."""
    first, second = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    groups = [{"params": [p], "update_group": n, "matrices": True} for p, n in ((first, "a"), (second, "b"))]
    optimizer = optimizer_of(name, groups)
    for p in (first, second):
        p.grad = torch.full((3, 3), 0.5)
    set_update(optimizer, lr=0.1, count=1, update_group="b")
    optimizer.step()
    assert torch.equal(first, torch.ones(3, 3))
    assert first not in optimizer.state
    assert (second < 1).all()
    set_update(optimizer, lr=0.1, count=1, update_group="a")
    optimizer.step()
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["StableAdamW", "Lamb", "Muon"])
def test_a_partition_nobody_described_is_an_error(name: str) -> None:
    optimizer = optimizer_of(name, [{"params": [nn.Parameter(torch.ones(2, 2))], "matrices": True}])
    flat = nn.Parameter(torch.ones(8))
    flat.grad = torch.ones(8)
    optimizer.param_groups[0]["params"] = [flat]
    set_update(optimizer, lr=0.1, count=1)
    with pytest.raises(TrainingError, match=rf"{name}\.shard"):
        optimizer.step()
