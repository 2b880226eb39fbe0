"""Chooses the kernel for a part of a layer if several can compute it: the one that a trial preferred, or the usual one.

A place is a part of the network that several kernels can compute: attention, the norm after a sublayer (with dropout
and residual), the loss over the vocabulary. At each place the layers name the kernels that support their tensors, the
usual one first and the written formula last, and compute with the one that `pick` returns. A process has one
preference (`set_preference`); `encoder_core/trials/kernel_trial.py` finds it.

A kernel for another place needs three things. Its name is in `Kernel`, its place in `Place`. The layer asks

    pick(["fused", "written"], dropped=dropout > 0.0, place="norm")

in every forward pass, with the kernels that support the current tensors. And with dropout all kernels of a place must
draw the same numbers, because the trial compares gradients. The trial then finds the place by itself and tries its
kernels one after the other, while all other places compute the written formula. An attention kernel is used even
before a trial. At other places a kernel is used only once a trial has found it right; until then the written formula
is.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Kernel = Literal["flash", "flash3", "cudnn", "fused", "blocked", "padded", "written"]
"""Names of kernels. `written`: the formula in torch's elementary operations, which supports all tensors everywhere."""

Place = Literal["attention", "norm", "loss", "update"]
"""Names of places. `norm`: dropout, residual and norm. `loss`: softmax and cross-entropy over the vocabulary. `update`:
StableAdamW's, which is no part of a network, but is tried and picked in the same way."""

KernelRequests = dict[tuple[Place, bool], dict[Kernel, None]]
"""Possible kernels by (place, with dropout), in the order in which layers named them."""


@dataclass(frozen=True)
class Preference:
    """Kernels by preference, the preferred one first. A kernel that is missing here is not used.

    Attributes:
        plain, dropped: kernels of attention without dropout, and with it.
        elsewhere: kernels of the other places, with dropout and without.
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
    preference: Preference | None = None
    asked: KernelRequests = field(default_factory=dict)


_process = _ProcessState()


def set_preference(preference: Preference | None) -> None:
    """Set the preference for all layers of this process; None: the usual kernels."""
    _process.preference = preference


def current_preference() -> Preference | None:
    """Return what `set_preference` set."""
    return _process.preference


def pick(possible: Sequence[Kernel], *, dropped: bool, place: Place = "attention") -> Kernel:
    """Return the most preferred kernel among those `possible` at a place.

    If none is preferred, return the first one for attention, and the last one elsewhere.
    """
    _process.asked.setdefault((place, dropped), {}).update(dict.fromkeys(possible))
    order = () if _process.preference is None else _process.preference.kernels_at(place, dropped=dropped)
    unasked = possible[0] if place == "attention" else possible[-1]
    return next((kernel for kernel in order if kernel in possible), unasked)


@contextmanager
def force_kernel(kernel: Kernel, place: Place = "attention") -> Iterator[None]:
    """Inside the block, compute with `kernel` if it is possible at the place, and with the written formula everywhere
    else.
    """
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
    """Record which kernels layers ask for inside the block."""
    before, _process.asked = _process.asked, {}
    try:
        yield _process.asked
    finally:
        _process.asked = before
