"""A step of several updates: each moves the parameters of its own update group, and nothing of the others."""

import pytest
import torch
from torch import nn

from encoder_core.optim.adamw import AdamW, StableAdamW
from encoder_core.optim.lamb import Lamb
from encoder_core.optim.muon import Muon
from encoder_core.optim.settings import AdamWConfig, LambConfig, MuonConfig, StableAdamWConfig
from encoder_core.optim.updates import set_update


@pytest.mark.parametrize("name", ["adamw", "stableadamw", "lamb", "muon"])
def test_other_update_groups_are_left_alone(name: str) -> None:
    """Though they have a gradient and would decay."""
    first, second = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    groups = [{"params": [p], "update_group": n, "matrices": True} for p, n in ((first, "a"), (second, "b"))]
    optimizer = {
        "adamw": lambda: AdamW(groups, AdamWConfig(lr=0.1)),
        "stableadamw": lambda: StableAdamW(groups, StableAdamWConfig(lr=0.1)),
        "lamb": lambda: Lamb(groups, LambConfig(lr=0.1)),
        "muon": lambda: Muon(groups, MuonConfig(lr=0.1)),
    }[name]()
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
