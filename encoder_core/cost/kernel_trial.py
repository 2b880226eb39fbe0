"""Tries the kernels of attention on this machine: which are right, and which of those are quick.

A network of the family, two layers deep, computes loss and gradients of the same rows by each kernel. They are compared
with those of the written formula in fp64; what the written formula itself loses in the run's precision says how far a
kernel may be off. Right kernels may be timed, on rows of the run's shape.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from encoder_core.cost.trial_network import (
    Subject,
    built,
    compute,
    gradients,
    random_batch,
    relative_error,
    smaller,
)
from encoder_core.families.build import ModelConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.kernel_choice import Kernel, Preference, asked, only
from encoder_core.objectives.losses import ObjectiveModule

_LENGTHS = (1, 33, 130, 7, 64)  # of the rows that are compared: shorter and longer than tiles, and one token
_SLACK = 4.0  # how many times the written formula's own error a kernel may have
_LEAST = 1e-6  # an error that is never held against a kernel
_TIMED, _WARM = 5, 2
_SAID = 500  # characters of what went wrong
_QUICKER = 0.9  # of the usual kernel's time: what is less so is not worth another choice


@dataclass(frozen=True)
class TriedKernel:
    """What a trial found.

    Attributes:
        dropped: whether attention had dropout.
        error: the largest relative error of a parameter's gradient; None where nothing came of it.
        bound: what it may be.
        comparable: whether its draws are those of the written formula: those of a GPU's own generator are not.
        seconds: of a forward and a backward pass on rows of the run's shape; None if it was not timed.
        failure: why nothing came of it.
    """

    kernel: Kernel
    dropped: bool
    error: float | None
    bound: float
    comparable: bool = True
    seconds: float | None = None
    failure: str = ""

    @property
    def right(self) -> bool:
        """Of what cannot be compared only that it computes."""
        return not self.failure and (
            not self.comparable or (self.error is not None and self.error <= self.bound)
        )


def try_kernels(
    subject: Subject, skipped: Mapping[Kernel, str], began: Callable[[Kernel], None], *, timed: bool
) -> list[TriedKernel]:
    """Every kernel that takes tensors of the subject, without dropout and, where it has some, with it; in the order in
    which the layers name them.

    `skipped` are not tried, for the reason that is given; `began` is told of each other one before it is.
    """
    found: dict[tuple[bool, Kernel], list[TriedKernel]] = {}
    told = dict.fromkeys(skipped)
    with torch.random.fork_rng():
        for network in subject.networks:
            for dropped in (False, True) if network.attention_dropout else (False,):
                trial = _Trial(subject, network, dropped)
                for kernel in trial.possible():
                    if kernel not in told:
                        began(kernel)
                        told[kernel] = None
                    one = trial.one(kernel, skipped.get(kernel), timed=timed)
                    found.setdefault((dropped, kernel), []).append(one)
    return [_worst(several) for several in found.values()]


def preference(tried: Sequence[TriedKernel]) -> Preference:
    """Right kernels: those whose draws belong to tokens first, a clearly quicker one before the usual one."""
    return Preference(_order(tried, False), _order(tried, True) or _order(tried, False))


def _order(tried: Sequence[TriedKernel], dropped: bool) -> tuple[Kernel, ...]:
    """A kernel whose dropout cannot be compared counts as right only if it is without dropout."""
    plain = {one.kernel for one in tried if not one.dropped and one.right}
    mine = [one for one in tried if one.dropped == dropped and one.right]
    mine = [one for one in mine if one.comparable or one.kernel in plain]
    mine.sort(key=lambda one: (one.kernel == "written", not one.comparable))
    quick = min(
        (one for one in mine if one.comparable and one.seconds is not None),
        key=lambda one: one.seconds or 0.0,
        default=None,
    )
    usual = mine[0].seconds if mine else None
    if quick is not None and usual is not None and (quick.seconds or 0.0) < _QUICKER * usual:
        mine.remove(quick)
        mine.insert(0, quick)
    return tuple(one.kernel for one in mine)


class _Trial:
    """Of one network, with dropout in attention or without."""

    def __init__(self, subject: Subject, network: ModelConfig, dropped: bool) -> None:
        self._subject, self._dropped = subject, dropped
        longest = min(network.max_length, max(subject.length, max(_LENGTHS)))
        lengths = [min(length, longest) for length in _LENGTHS]
        remembers = isinstance(network, XlnetConfig) and network.memory
        if remembers:  # then rows are of one length
            lengths = [max(lengths)] * len(lengths)
        self._network = smaller(network, longest, min(*lengths, subject.length))
        self._module = built(self._network, subject).train(dropped)
        self._batch = random_batch(self._network, lengths, subject.device)
        self._exact = self._by("written", deepcopy(self._module).double())
        self._bound = max(_LEAST, _SLACK * relative_error(self._by("written", self._module), self._exact))

    def possible(self) -> list[Kernel]:
        """What layers ask for; one forward pass by the written formula tells."""
        with asked() as seen, torch.no_grad(), only("written"):
            compute(self._module, self._batch, backward=False)
        return list(seen.get(self._dropped, {}))

    def one(self, kernel: Kernel, skipped: str | None, *, timed: bool) -> TriedKernel:
        comparable = not self._dropped or kernel not in _DRAW_BY_DEVICE or self._subject.device.type == "cpu"
        tried = TriedKernel(kernel, self._dropped, None, self._bound, comparable)
        if skipped is not None:
            return replace(tried, failure=skipped)
        try:
            error = relative_error(self._by(kernel, self._module), self._exact)
            seconds = self._time(kernel) if timed and (error <= self._bound or not comparable) else None
        except (RuntimeError, ValueError, TypeError, AssertionError, ImportError) as failed:
            # whatever a compiler or a device says: the kernel is left out, and this is put on record
            return replace(tried, failure=f"{type(failed).__name__}: {failed}"[:_SAID])
        return replace(tried, error=error, seconds=seconds)

    def _by(self, kernel: Kernel, module: ObjectiveModule) -> dict[str, Tensor]:
        """Gradients by name."""
        with only(kernel):
            return gradients(module, self._batch)

    def _time(self, kernel: Kernel) -> float:
        """Seconds of a forward and a backward pass on rows of the run's shape, the median of some."""
        subject, seconds = self._subject, list[float]()
        batch = random_batch(self._network, [subject.length] * subject.rows, subject.device)
        with only(kernel):
            for _ in range(_WARM + _TIMED):
                began = time.perf_counter()
                compute(self._module, batch)
                if subject.device.type == "cuda":
                    torch.cuda.synchronize(subject.device)
                seconds.append(time.perf_counter() - began)
        self._module.zero_grad(set_to_none=True)
        return statistics.median(seconds[_WARM:])


_DRAW_BY_DEVICE: tuple[Kernel, ...] = ("flash", "padded")


def _worst(several: Sequence[TriedKernel]) -> TriedKernel:
    """Of the networks of an objective: one that failed, or whose error is the largest; seconds of all."""
    worst = max(several, key=lambda one: (bool(one.failure), (one.error or 0.0) / one.bound))
    seconds = [one.seconds for one in several]
    whole = None if any(each is None for each in seconds) else sum(each or 0.0 for each in seconds)
    return replace(worst, seconds=whole)
