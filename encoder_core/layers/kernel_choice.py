"""Which kernel computes a part of a layer where several can: what a trial on this machine found, or else the usual one.

A place is a part of the network that several kernels compute: attention, the norm after a sublayer (with dropout and
residual), the loss over the vocabulary. At each place the layers name the kernels that take their tensors, the usual
one first and the written formula last, and compute with what `pick` returns. A process has one preference (`prefer`);
`encoder_core/trials/kernel_trial.py` finds it.

A kernel for another place needs three things. Its name is in `Kernel`, its place in `Place`. The layer asks

    pick(["fused", "written"], dropped=dropout > 0.0, place="norm")

in every forward pass, with the kernels that take the tensors at hand. And with dropout all kernels of a place draw the
same numbers, since the trial compares gradients. The trial then finds the place by itself and tries its kernels one
after the other, while all other places compute by the written formula. A kernel of attention is used before any trial.
A kernel of another place is used once a trial has found it right, and the written formula until then.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Kernel = Literal["flash", "flash3", "fused", "blocked", "padded", "written"]
"""`written`: the formula by torch's elementary operations. It takes everything everywhere."""

Place = Literal["attention", "norm", "loss"]
"""`norm`: dropout, residual and norm. `loss`: softmax and cross-entropy over the vocabulary."""

Asked = dict[tuple[Place, bool], dict[Kernel, None]]
"""Kernels that were possible, by place and by whether there was dropout, in the order in which layers named them."""


@dataclass(frozen=True)
class Preference:
    """Kernels, the preferred one first, those that are left out missing.

    Attributes:
        plain, dropped: of attention, without dropout and with it.
        elsewhere: of the other places, with dropout and without.
    """

    plain: tuple[Kernel, ...]
    dropped: tuple[Kernel, ...]
    elsewhere: Mapping[Place, tuple[Kernel, ...]] = field(default_factory=dict)

    def at(self, place: Place, *, dropped: bool) -> tuple[Kernel, ...]:
        if place == "attention":
            return self.dropped if dropped else self.plain
        return self.elsewhere.get(place, ())


@dataclass
class _Process:
    preference: Preference | None = None
    asked: Asked = field(default_factory=dict)


_process = _Process()


def prefer(preference: Preference | None) -> None:
    """For all layers of this process from now on; None: the usual kernels."""
    _process.preference = preference


def pick(possible: Sequence[Kernel], *, dropped: bool, place: Place = "attention") -> Kernel:
    """The preferred one among those that are `possible` at a place. Where none of them is preferred: of attention the
    first, elsewhere the last."""
    _process.asked.setdefault((place, dropped), {}).update(dict.fromkeys(possible))
    order = () if _process.preference is None else _process.preference.at(place, dropped=dropped)
    unasked = possible[0] if place == "attention" else possible[-1]
    return next((kernel for kernel in order if kernel in possible), unasked)


@contextmanager
def only(kernel: Kernel, place: Place = "attention") -> Iterator[None]:
    """While this lasts, `kernel` where it is possible at the place, and the written formula everywhere else."""
    before = _process.preference
    written: tuple[Kernel, ...] = ("written",)
    order = (kernel, *written)
    at_attention = order if place == "attention" else written
    prefer(Preference(at_attention, at_attention, {place: order}))
    try:
        yield
    finally:
        prefer(before)


@contextmanager
def asked() -> Iterator[Asked]:
    """What layers ask for while this lasts."""
    before, _process.asked = _process.asked, {}
    try:
        yield _process.asked
    finally:
        _process.asked = before
