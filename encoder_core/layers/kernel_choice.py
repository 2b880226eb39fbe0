"""Which kernel computes attention where several can: what a trial on this machine found, or else the usual one.

The layers name the kernels that take their tensors, the usual one first, and compute with what `pick` returns. A
process has one preference (`prefer`); `encoder_core/cost/kernel_trial.py` finds it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Kernel = Literal["flash", "flash3", "fused", "blocked", "padded", "written"]
"""`written`: the formula in a padded rectangle, by torch's elementary operations. It takes everything everywhere."""


@dataclass(frozen=True)
class Preference:
    """Kernels, the preferred one first, those that are left out missing: without dropout, and with it."""

    plain: tuple[Kernel, ...]
    dropped: tuple[Kernel, ...]


@dataclass
class _Process:
    preference: Preference | None = None
    asked: dict[bool, dict[Kernel, None]] = field(default_factory=dict)


_process = _Process()


def prefer(preference: Preference | None) -> None:
    """For all attention of this process from now on; None: the usual kernels."""
    _process.preference = preference


def pick(possible: Sequence[Kernel], *, dropped: bool) -> Kernel:
    """The preferred one among those that are `possible`; the first where none of them is preferred."""
    _process.asked.setdefault(dropped, {}).update(dict.fromkeys(possible))
    if _process.preference is None:
        return possible[0]
    order = _process.preference.dropped if dropped else _process.preference.plain
    return next((kernel for kernel in order if kernel in possible), possible[0])


@contextmanager
def only(kernel: Kernel) -> Iterator[None]:
    """While this lasts, `kernel` where it is possible and the written formula elsewhere."""
    before = _process.preference
    order: tuple[Kernel, ...] = (kernel, "written")
    prefer(Preference(order, order))
    try:
        yield
    finally:
        prefer(before)


@contextmanager
def asked() -> Iterator[dict[bool, dict[Kernel, None]]]:
    """What was possible while this lasts, with dropout and without, in the order in which layers named it."""
    before, _process.asked = _process.asked, {}
    try:
        yield _process.asked
    finally:
        _process.asked = before
