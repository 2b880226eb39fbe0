"""A CPU that plays a GPU with little memory: what a forward pass keeps for its backward pass is counted. Where it is
more than there is, memory is out, in that forward pass or in the middle of its backward pass."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

DEVICE = "a CPU that plays a GPU"


@dataclass(frozen=True)
class Memory:
    """Of each rank's device.

    Attributes:
        said: bytes that the device says it has, of which the estimate makes its number of rows.
        kept: bytes that a graph may keep, by rank.
        backward: memory is found to be out only when so many kept tensors have been used; 0: in the forward pass.
        falls: the graph after which a rank's `kept` is another: (rank, graphs, bytes).
    """

    said: int
    kept: tuple[int, ...]
    backward: int = 0
    falls: tuple[int, int, int] | None = None


class Device:
    """Counts what graphs keep, each tensor once."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self._memory, self._rank = memory, rank
        self._graphs = 0

    def limited(self, model: Any) -> Any:
        """`model`, whose graphs are counted."""
        import torch

        forward = model.forward

        def run(*given: Any) -> Any:
            if not (torch.is_grad_enabled() and given[0].rows):
                return forward(*given)
            self._graphs += 1
            own = {p.untyped_storage().data_ptr() for p in model.parameters()}
            with self._counting(own):
                return forward(*given)

        model.forward = run
        return model

    def _limit(self) -> int:
        falls = self._memory.falls
        if falls is not None and falls[0] == self._rank and self._graphs > falls[1]:
            return falls[2]
        return self._memory.kept[self._rank]

    def _counting(self, own: set[int]) -> Any:
        import torch

        kept: dict[int, int] = {}
        limit, late, used = self._limit(), self._memory.backward, 0

        def out() -> bool:
            return sum(kept.values()) > limit

        def pack(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            if out() and not late:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return x

        def unpack(x: torch.Tensor) -> torch.Tensor:
            nonlocal used
            used += 1
            if out() and used == late:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return x

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@contextmanager
def small_memory(memory: Memory | None, rank: int) -> Iterator[None]:
    """None: a CPU as it is."""
    with ExitStack() as stack:
        if memory is not None:
            from launcher.runtime.rank import build as building
            from launcher.runtime.rank import main, microbatch_size

            room, build, device = (
                microbatch_size.DeviceMemory(memory.said, "cuda", DEVICE),
                building.build_model,
                Device(memory, rank),
            )
            stack.enter_context(patch.object(microbatch_size, "device_memory", lambda ranks: room))
            stack.enter_context(patch.object(main, "build_model", lambda *given: device.limited(build(*given))))
        yield
