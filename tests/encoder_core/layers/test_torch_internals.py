"""A private name of torch's that is gone is an error that says which."""

import subprocess
import sys

import pytest
import torch

from encoder_core.errors import LibraryChanged
from encoder_core.layers import torch_internals as internals

CALLS = {
    "_softmax_backward_data": lambda: internals.softmax_backward(torch.ones(1, 1), torch.ones(1, 1)),
    "_foreach_copy_": lambda: internals.copy_to_each([torch.ones(1)], [torch.ones(1)]),
    "_foreach_add_": lambda: internals.add_to_each([torch.ones(1)], [torch.ones(1)], 1.0),
}


@pytest.mark.parametrize("path", internals.PRIVATE_NAMES)
def test_names_are_there(path: str) -> None:
    assert internals.resolve(path) is not None


@pytest.mark.parametrize("name", CALLS)
def test_a_name_that_is_gone_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, name)
    with pytest.raises(LibraryChanged) as found:
        CALLS[name]()
    assert name in found.value.problem
    assert "torch 2." in found.value.problem


MAKING = """
import sys, torch
from encoder_core.layers.torch_internals import skip_compiler_import
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.settings import AdamWConfig
from encoder_core.optim.updates import set_update
skip_compiler_import()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = AdamW([weight], AdamWConfig(lr=0.5))
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
weight.grad = torch.ones(3)
set_update(optimizer, lr=0.5, count=1)
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
assert weight[0] < 1 and weight.grad is None and len(optimizer.param_groups) == 2
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.long
def test_an_optimizer_is_made_and_used_without_torchs_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", MAKING], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
