"""A private name of torch's that is gone is an error that says which."""

import pytest
import torch

from encoder_core.errors import LibraryChanged
from encoder_core.layers import torch_internals as internals

CALLS = {
    "_softmax_backward_data": lambda: internals.softmax_backward(torch.ones(1, 1), torch.ones(1, 1)),
    "_foreach_add_": lambda: internals.add_to_each([torch.ones(1)], [torch.ones(1)], 1.0),
}


@pytest.mark.parametrize("path", internals.NAMES)
def test_names_are_there(path: str) -> None:
    assert callable(internals.name_of(path))


@pytest.mark.parametrize("name", CALLS)
def test_a_name_that_is_gone_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, name)
    with pytest.raises(LibraryChanged) as found:
        CALLS[name]()
    assert name in found.value.problem
    assert "torch 2." in found.value.problem
