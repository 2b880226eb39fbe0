"""Chooses among the kernels that can compute an operation: the one that a trial preferred, or the default.

Operations with several kernels are called places: attention, the norm after a sublayer (with dropout and residual), the
loss over the vocabulary. At each place the layers list the kernels that support their tensors, the default first and
`written` (elementary torch operations) last, and use the one that `pick` returns. A process has one preference
(`set_preference`). Before training, a trial checks and times the kernels (`encoder_core/trials/kernel_trial.py`), and
so finds the preference.

To add a place, add its name to `Place` and its kernels to `Kernel`, and let the layer call

    pick(["fused", "written"], dropped=dropout > 0.0, place="norm")

in every forward pass, with the kernels that support the current tensors. With dropout, all kernels of a place must draw
the same numbers, because the trial compares gradients. The trial finds the place by itself, and tries its kernels one
after the other while all other places use `written`. Attention kernels are used even without a trial; at other places
`written` is used until a trial has found another kernel correct.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Kernel = Literal["flash", "flash3", "flash4", "cudnn", "fused", "blocked", "padded", "written"]
"""Names of kernels. `written`: elementary torch operations, which support all tensors on all devices."""

Place = Literal["attention", "norm", "loss", "update"]
"""Operations with several kernels. `norm`: dropout, residual sum and norm. `loss`: softmax and cross-entropy over the
vocabulary. `update`: StableAdamW's update."""

KernelRequests = dict[tuple[Place, bool], dict[Kernel, None]]
"""Supported kernels by (place, with dropout), in the order in which layers listed them."""


@dataclass(frozen=True)
class Preference:
    """The kernels to use, in order of preference. If none of them supports the tensors, `pick` takes the default.

    Attributes:
        plain, dropped: attention kernels without dropout, and with dropout.
        elsewhere: kernels of the other places, with or without dropout.
    """

    plain: tuple[Kernel, ...]
    dropped: tuple[Kernel, ...]
    elsewhere: Mapping[Place, tuple[Kernel, ...]] = field(default_factory=dict)

    def kernels_at(self, place: Place, *, dropped: bool) -> tuple[Kernel, ...]:
        if place == "attention":
            return self.dropped if dropped else self.plain
        return self.elsewhere.get(place, ())


@dataclass
class _ProcessState:
    """This process's preference, and the kernels that layers asked `pick` for."""

    preference: Preference | None = None
    asked: KernelRequests = field(default_factory=dict)


_process = _ProcessState()


def set_preference(preference: Preference | None) -> None:
    """Set the preference of this process; None: the default kernels."""
    _process.preference = preference


def current_preference() -> Preference | None:
    """Return the preference of this process; None: the default kernels."""
    return _process.preference


def pick(possible: Sequence[Kernel], *, dropped: bool, place: Place = "attention") -> Kernel:
    """Return the most preferred kernel of the `possible` ones, and record that they were requested.

    If the preference has none of them, return the first for attention, and the last at other places.
    """
    _process.asked.setdefault((place, dropped), {}).update(dict.fromkeys(possible))
    order = () if _process.preference is None else _process.preference.kernels_at(place, dropped=dropped)
    unasked = possible[0] if place == "attention" else possible[-1]
    return next((kernel for kernel in order if kernel in possible), unasked)


@contextmanager
def force_kernel(kernel: Kernel, place: Place = "attention") -> Iterator[None]:
    """Inside the block, use `kernel` at the place if it supports the tensors, and `written` in all other cases."""
    before = _process.preference
    written: tuple[Kernel, ...] = ("written",)
    order = (kernel, *written)
    at_attention = order if place == "attention" else written
    set_preference(Preference(at_attention, at_attention, {place: order}))
    try:
        yield
    finally:
        set_preference(before)


@contextmanager
def record_requests() -> Iterator[KernelRequests]:
    """Record the calls of `pick` inside the block: places and their supported kernels."""
    before, _process.asked = _process.asked, {}
    try:
        yield _process.asked
    finally:
        _process.asked = before
