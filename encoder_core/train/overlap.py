"""Sums gradients over the ranks during the backward pass, in the same buckets on every rank.

ZeRO 1 in bf16: DeepSpeed adds each gradient to an fp32 sum (one tensor holds the sums of a parameter group), and
reduces the sums over ranks after the last backward pass. Here a range of sums is reduced, in place, as soon as its last
gradient has arrived.

ZeRO 2 and 3: DeepSpeed fills buckets with gradients in order of arrival, and sums buckets over the ranks by position,
whichever parameters lie there. On a rank with no rows, or with too few for compiled code, gradients arrive in another
order. Here DeepSpeed receives gradients in a fixed order: the reverse of the order in which a forward pass uses the
parameters.

ZeRO 3 reduces the gradients of a compiled layer after each backward pass through it. If a forward pass calls the layer
several times (ALBERT's one layer, DeBERTa's last layer), ZeRO 3 gets zeros in all of these passes but the last, because
autograd adds up the gradients of all calls before a parameter receives them. Here the zeros are dropped.
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
    """A range of gradient sums that is reduced over the ranks at once.

    Attributes:
        waiting: number of parameters whose gradients of the current backward pass have not arrived yet.
        sent: the tensor that is being reduced: the sums themselves, or a copy in another precision.
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
        sums: for each parameter group, the fp32 sums of its parameters (end to end, then padding), and the parameters.
        order: all parameters in the order in which a forward pass uses them.
        dtype: dtype of the reduction over ranks.
        bucket: smallest number of elements that are reduced at a time.
    """

    def __init__(
        self,
        sums: Sequence[tuple[Tensor, Sequence[nn.Parameter]]],
        order: Sequence[nn.Parameter],
        dtype: torch.dtype,
        bucket: int,
    ) -> None:
        self._dtype = dtype
        self._active, self._next = False, 0  # whether sums are reduced now; index of the next bucket
        place = {id(p): number for number, p in enumerate(order)}
        cut = [each for flat, parameters in sums for each in _cut_buckets(flat, parameters, bucket)]
        # The backward pass reaches a bucket's first parameter in forward order last; buckets are in that order.
        self._buckets = sorted(cut, key=lambda each: -min(place[id(p)] for p in each.parameters))
        for each in self._buckets:
            for p in each.parameters:
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(partial(self._receive_gradient, each))  # type: ignore[no-untyped-call]

    def begin_last_pass(self) -> None:
        """Prepare to reduce sums in the next backward pass, the last of an update group."""
        self._active, self._next = True, 0
        for each in self._buckets:
            each.waiting = sum(p.requires_grad for p in each.parameters)
        self._reduce_complete_buckets()

    def finish(self) -> None:
        """Reduce the remaining buckets (parameters may lack a gradient), and wait for all reductions. Collective."""
        self._active = False
        for each in self._buckets[self._next :]:
            self._reduce(each)
        for each in self._buckets:
            each.work.wait()
            if each.sent is not each.sums and each.sent is not None:
                each.sums.copy_(each.sent)
            each.sent = each.work = None

    def ensure_ended(self) -> None:
        """Check, after the last backward pass, that the sums were reduced over all ranks.

        Raises:
            LibraryChanged: DeepSpeed did not call `finish`.
        """
        if self._active:
            raise library_changed("deepspeed", "buffered_allreduce_fallback (not called in a step)")

    def _receive_gradient(self, bucket: _Bucket, _: Tensor) -> None:
        """Count a gradient that was added to the sums of `bucket`, and reduce buckets that are complete."""
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
    """Cut `flat` between parameters into buckets of at least `min_elements` elements. The last bucket may be smaller,
    and includes the padding.
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
    """Passes gradients to DeepSpeed's ZeRO 2 or 3 optimizer in a fixed order; gradients that arrive early wait.

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
        """Receive a parameter's gradient, and pass on those whose turn it is. Stage 2 also gives the group's number."""
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
        """End the backward pass: pass on the gradients that still wait (a parameter before them has no gradient), and
        let DeepSpeed reduce the last buckets. Collective.
        """
        for parameter in self._order[self._next :]:
            if id(parameter) in self._early:
                self._reduce(*self._early.pop(id(parameter)))
        self._next, self._ended = 0, True
        self._end()

    def _note_reached(self, parameter: int, _: Tensor) -> None:
        """Record that autograd is about to give the parameter with this id its gradient. DeepSpeed is not involved."""
        self._unreached.discard(parameter)

    def begin_pass(self) -> None:
        """Prepare for a backward pass: forget the parameters that earlier passes, such as a rehearsal, have reached."""
        self._unreached, self._handed, self._ended = set(self._hooked), 0, False

    def ensure_ended(self) -> None:
        """Check, after a backward pass, that DeepSpeed received all gradients through this object.

        Raises:
            LibraryChanged: DeepSpeed did not use the replaced methods for all gradients.
        """
        if not self._ended:
            raise library_changed("deepspeed", f"{REDUCERS[1]} (not called after a backward pass)")
        reached = len(self._hooked) - len(self._unreached)
        if self._handed != reached:
            raise library_changed("deepspeed", f"{REDUCERS[0]} (called for {self._handed} of {reached} gradients)")
