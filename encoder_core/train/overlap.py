"""Sums gradients over the ranks while the backward pass still runs, in the same buckets on every rank.

ZeRO 1 in bf16: DeepSpeed adds each gradient to an fp32 sum, all sums of a parameter group in one tensor, and reduces
them after the last backward pass. Here a range of such a tensor is reduced, in place, as soon as its last gradient
has arrived.

ZeRO 2 and 3: DeepSpeed fills buckets with gradients in order of arrival and sums them over the ranks by position,
whichever parameters they belong to. A rank whose rows take another graph (it has no rows, or too few for compiled
code) has another order. Here DeepSpeed gets gradients in a fixed order: that in which backward passes reach
parameters, the last layers first.

ZeRO 3 passes on the gradients of a compiled layer after each of its backward passes. If a forward pass calls the layer
more than once (ALBERT's one layer, the last one of DeBERTa), all but the last pass on zeros: autograd adds the
gradients of all calls before a parameter gets them. Here these zeros are dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float32
from torch import Tensor, nn

from encoder_core.errors import library_changed
from encoder_core.train.deepspeed_internals import REDUCERS, replace_method


@dataclass
class _Bucket:
    """A range of sums that is reduced at once.

    Attributes:
        waiting: number of parameters whose gradients of the last backward pass have not arrived yet.
        sent: the tensor that is being reduced: the sums themselves, or their copy in another precision.
    """

    sums: Float32[Tensor, " numbers"]
    parameters: list[nn.Parameter]
    waiting: int = 0
    sent: Tensor | None = None
    work: Any = None


class OverlappedSums:
    """Reduces DeepSpeed's fp32 sums during the backward pass. A single rank does not need it.

    Its hooks must run after those that add to the sums, so create it after the DeepSpeed engine.

    Args:
        sums: for each parameter group, its parameters' fp32 sums end to end (and padding), and the parameters.
        order: all parameters in the order in which a forward pass uses them.
        dtype: dtype in which ranks sum.
        bucket: number of numbers that are reduced at a time, at least.
    """

    def __init__(
        self,
        sums: Sequence[tuple[Tensor, Sequence[nn.Parameter]]],
        order: Sequence[nn.Parameter],
        dtype: torch.dtype,
        bucket: int,
    ) -> None:
        self._dtype = dtype
        self._active, self._next = False, 0
        place = {id(p): number for number, p in enumerate(order)}
        cut = [each for flat, parameters in sums for each in _cut_buckets(flat, parameters, bucket)]
        # A bucket is complete when its first parameter in the forward order is; buckets are in order of completion.
        self._buckets = sorted(cut, key=lambda each: -min(place[id(p)] for p in each.parameters))
        for each in self._buckets:
            for p in each.parameters:
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(partial(self._receive_gradient, each))  # type: ignore[no-untyped-call]

    def begin_last_pass(self) -> None:
        """Announce that the next backward pass is the last of an update group."""
        self._active, self._next = True, 0
        for each in self._buckets:
            each.waiting = sum(p.requires_grad for p in each.parameters)
        self._reduce_complete_buckets()

    def finish(self) -> None:
        """Wait for all sums, also those of parameters without a gradient. Collective."""
        self._active = False
        for each in self._buckets[self._next :]:
            self._reduce(each)
        for each in self._buckets:
            each.work.wait()
            if each.sent is not each.sums and each.sent is not None:
                each.sums.copy_(each.sent)
            each.sent = each.work = None

    def ensure_ended(self) -> None:
        """Check, after the last backward pass, that the sums are those of all ranks.

        Raises:
            LibraryChanged: DeepSpeed did not call `finish`.
        """
        if self._active:
            raise library_changed("deepspeed", "buffered_allreduce_fallback was not called: it")

    def _receive_gradient(self, bucket: _Bucket, _: Tensor) -> None:
        """Count a gradient that has been added to the sum of `bucket`."""
        if self._active:
            bucket.waiting -= 1
            self._reduce_complete_buckets()

    def _reduce_complete_buckets(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._reduce(self._buckets[self._next])
            self._next += 1

    def _reduce(self, bucket: _Bucket) -> None:
        bucket.sent = bucket.sums.to(self._dtype)
        bucket.work = dist.all_reduce(bucket.sent, async_op=True)


def _cut_buckets(flat: Tensor, parameters: Sequence[nn.Parameter], min_elements: int) -> list[_Bucket]:
    """Return ranges of whole parameters, each of at least `min_elements` numbers except the last one, which includes
    the padding.
    """
    found, start, stop, own = list[_Bucket](), 0, 0, list[nn.Parameter]()
    for p in parameters:
        own.append(p)
        stop += p.numel()
        if stop - start >= min_elements:
            found.append(_Bucket(flat[start:stop], own))
            start, own = stop, []
    if own:
        found.append(_Bucket(flat[start:], own))
    return found


class GradientSequencer:
    """Passes gradients to DeepSpeed's optimizer of ZeRO 2 or 3 in a fixed order; early ones wait.

    Args:
        optimizer: DeepSpeed's optimizer.
        order: all parameters in the order in which a forward pass uses them.
    """

    def __init__(self, optimizer: Any, order: Sequence[nn.Parameter]) -> None:
        self._order = list(reversed(order))
        self._next, self._early = 0, dict[int, tuple[Any, ...]]()
        hooked = [parameter for parameter in order if parameter.requires_grad]
        for parameter in hooked:
            parameter.register_hook(partial(self._note_reached, id(parameter)))  # type: ignore[no-untyped-call]
        self._hooked = frozenset(map(id, hooked))
        self._unreached, self._handed, self._ended = set(self._hooked), 0, False
        reduce, end = REDUCERS
        self._reduce = replace_method(optimizer, reduce, self._receive_gradient)
        self._end = replace_method(optimizer, end, self._finish)

    def _receive_gradient(self, parameter: nn.Parameter, *group: int) -> None:
        """Accept the gradient of `parameter`; stage 2 also passes its group."""
        if id(parameter) in self._unreached:
            parameter.grad = None
            return
        self._handed += 1
        self._early[id(parameter)] = (parameter, *group)
        while self._next < len(self._order):
            following = self._order[self._next]
            if id(following) in self._early:
                self._reduce(*self._early.pop(id(following)))
            elif following.requires_grad:
                return
            self._next += 1

    def _finish(self) -> None:
        """End the backward pass: pass on gradients that waited for a parameter without a gradient, and reduce what is
        left in buckets. Collective.
        """
        for parameter in self._order[self._next :]:
            if id(parameter) in self._early:
                self._reduce(*self._early.pop(id(parameter)))
        self._next, self._ended = 0, True
        self._end()

    def _note_reached(self, parameter: int, _: Tensor) -> None:
        """Note that the backward pass has reached a parameter, independently of DeepSpeed: just before it gets its
        gradient."""
        self._unreached.discard(parameter)

    def begin_pass(self) -> None:
        """Prepare for a backward pass. What a rehearsal reached does not count: its gradients are not summed."""
        self._unreached, self._handed, self._ended = set(self._hooked), 0, False

    def ensure_ended(self) -> None:
        """Check, after a backward pass, that all gradients were passed on in this order.

        Raises:
            LibraryChanged: DeepSpeed did not use the replaced methods for all gradients.
        """
        if not self._ended:
            raise library_changed("deepspeed", f"{REDUCERS[1]} was not called after a backward pass: it")
        reached = len(self._hooked) - len(self._unreached)
        if self._handed != reached:
            raise library_changed("deepspeed", f"{REDUCERS[0]} had {self._handed} of {reached} gradients: it")
