"""A step of several updates: each moves the parameters of its own update group, and nothing of the others."""

import pytest
import torch
from torch import nn

from encoder_core.optim.adamw import AdamW, AdamWConfig
from encoder_core.optim.lamb import Lamb, LambConfig
from encoder_core.optim.updates import set_update


@pytest.mark.parametrize("optimizer_class", [AdamW, Lamb])
def test_other_update_groups_are_left_alone(optimizer_class: type[AdamW] | type[Lamb]) -> None:
    """Though they have a gradient and would decay."""
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [first], "update_group": "a"}, {"params": [second], "update_group": "b"}]
    config = AdamWConfig(lr=0.1) if optimizer_class is AdamW else LambConfig(lr=0.1)
    optimizer = optimizer_class(groups, config)  # type: ignore[arg-type]
    for p in (first, second):
        p.grad = torch.full((3,), 0.5)
    set_update(optimizer, lr=0.1, count=1, update_group="b")
    optimizer.step()
    assert torch.equal(first, torch.ones(3))
    assert first not in optimizer.state
    assert (second < 1).all()
    set_update(optimizer, lr=0.1, count=1, update_group="a")
    optimizer.step()
    assert torch.equal(first, second)
