"""Modules without memory, for their names, shapes and sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


@contextmanager
def on_meta() -> Iterator[None]:
    """What is built inside is on the meta device."""
    with _WithoutDraws(), torch.device("meta"):
        yield


class _WithoutDraws(TorchFunctionMode):
    """Leaves out normal draws, which on the meta device draw nothing and yet import torch's compiler: a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.init.normal_:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))
