"""The memory of a node, which may be full when its ranks are to hand their state over."""

from collections.abc import Sequence
from typing import Any, Protocol
from unittest import mock

from checkpoints.memory import ReadBytes
from checkpoints.memory_slots import Slot, SlotDescription


class _Line(Protocol):
    def stop_requested(self) -> bool: ...


class Node:
    """A rank's access to it, which finds nothing there. `full`: whether slots must be made anew at the end, and there
    is no memory for them."""

    shares, ranks = False, 1

    def __init__(self, line: _Line, *, full: bool) -> None:
        if full:
            fits, make = Slot.fits, Slot.create

            def fit(slot: Slot, body: int, description: int) -> bool:
                return not line.stop_requested() and fits(slot, body, description)

            def made(body: int, description: int, *, free_bytes: int = 0) -> Slot:
                if line.stop_requested():
                    raise OSError("no memory")
                return make(body, description, free_bytes=free_bytes)

            mock.patch.object(Slot, "fits", fit).start()
            mock.patch.object(Slot, "create", made).start()

    def note_completed_set(self, rank: int, count: int, slots: Sequence[Slot]) -> None: ...
    def drop_all_sets(self) -> None: ...
    def list_sets(self) -> list[Any]:
        return []

    def describe(self, held: Any) -> SlotDescription:
        raise NotImplementedError

    def open_set(self, held: Any) -> ReadBytes:
        raise NotImplementedError
