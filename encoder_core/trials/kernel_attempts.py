"""The process of a kernel trial: it tries one kernel after the other, and reports each before the next.

A network of the family, two layers deep, computes loss and gradients of the same rows with each kernel, at one place
at a time, and with the written formula everywhere else. The gradients are compared with those of the written formula
in fp64. The error of the written formula in the run's precision decides how large a kernel's error may be.
StableAdamW's kernels are compared on drawn gradients, by weights and moments.

After a kernel that is not right, the written formula must still give the same result. Otherwise nothing more is tried
in this process.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.kernel_choice import force_kernel, record_requests
from encoder_core.optim.adamw import StableAdamW
from encoder_core.optim.settings import StableAdamWConfig
from encoder_core.optim.shards import ShardSegment
from encoder_core.optim.updates import set_update
from encoder_core.trials.kernel_trial import MAX_ERROR_CHARACTERS, Candidate, TrialUnit, TriedKernel
from encoder_core.trials.trial_network import (
    TrialSubject,
    apply_settings,
    build_module,
    compute_gradients,
    random_batch,
    relative_error,
    run_passes,
    shrink_network,
)
from encoder_core.trials.trial_process import Report, error_text

# Lengths of the compared rows: shorter and longer than tiles, and one token.
_ROW_TOKENS = (1, 33, 130, 7, 64)
_ERROR_RATIO = 4.0  # how many times the written formula's own error a kernel may have
_ACCEPTED_ERROR = 1e-6  # an error that is always accepted
_PARAMETER_SIZES = (1, 700, 5000, 2048, 33)  # elements: less than a block of the kernel, one, and more
_DRAW_BY_DEVICE: tuple[Candidate, ...] = (("attention", "flash"), ("attention", "padded"))


class Reporter(Protocol):
    def report(self, **what: object) -> None: ...


def serve(request: Report, line: Reporter) -> None:
    """Try the units that the request asks for, except those already `done`. Ends early after a kernel that did harm."""
    apply_settings(request["settings"])
    subject = TrialSubject.from_json(request["subject"])
    done = {TrialUnit(*unit) for unit in request["done"]}
    skipped: dict[Candidate, str] = {(place, kernel): why for place, kernel, why in request["skipped"]}
    for trial, unit in _list_units(subject):
        if unit in done:
            continue
        reason, harm = skipped.get((unit.place, unit.kernel)), ""
        if reason is not None:
            found = trial.result_with_failure(unit, reason)
        else:
            line.report(unit=unit, bound=trial.bound)
            found = trial.try_kernel(unit)
            harm = "" if found.is_right else trial.damage_text()
            if harm:
                text = f"{found.failure or 'its results are wrong'}; {harm}"
                found = replace(found, failure=text[:MAX_ERROR_CHARACTERS])
        line.report(unit=unit, found=asdict(found), harmed=bool(harm))
        if harm:
            return


def _list_units(subject: TrialSubject) -> Iterator[tuple["_Trial", TrialUnit]]:
    for number, network in enumerate(subject.networks):
        for dropped in (False, True) if network.attention_dropout or network.dropout else (False,):
            trial = _Trial(subject, network, dropped)
            for candidate in trial.possible_kernels():
                yield trial, TrialUnit(number, dropped, *candidate)
    if subject.stable:
        update = _UpdateTrial(subject)
        for candidate in update.possible_kernels():
            yield update, TrialUnit(0, False, *candidate)


class _Trial:
    """A trial for one network, with dropout or without."""

    def __init__(self, subject: TrialSubject, network: ModelConfig, dropped: bool) -> None:
        self.subject, self._dropped = subject, dropped
        longest = min(network.max_length, max(subject.length, max(_ROW_TOKENS)))
        lengths = [min(length, longest) for length in _ROW_TOKENS]
        if network.recurrence is not None:  # rows of one length, as in training with XLNet's memory
            lengths = [max(lengths)] * len(lengths)
        self._network = shrink_network(network, longest, min(*lengths, subject.length))
        self._module = build_module(self._network, subject).train(dropped)
        shapes = (lengths, [max(lengths)] * 2)  # some kernels support full rows only
        batches = [random_batch(self._network, shape, subject.device) for shape in shapes]
        self._batches = batches + ([_as_causal(batch) for batch in batches] if subject.causal else [])

    def possible_kernels(self) -> list[Candidate]:
        """Return the kernels that layers ask for in one forward pass with the written formula."""
        with record_requests() as seen, torch.no_grad(), force_kernel("written"):
            self._request_kernels()
        return [
            (place, kernel)
            for (place, dropped), kernels in seen.items()
            if dropped == self._dropped
            for kernel in kernels
        ]

    def _request_kernels(self) -> None:
        for batch in self._batches:
            run_passes(self._module, batch, backward=False)

    def _compared_tensors(self, *, exact: bool = False) -> dict[str, Tensor]:
        """Return what is compared, by name. `exact`: computed in fp64."""
        return compute_gradients(deepcopy(self._module).double() if exact else self._module, *self._batches)

    @cached_property
    def _exact_tensors(self) -> dict[str, Tensor]:
        with force_kernel("written"):
            return self._compared_tensors(exact=True)

    @cached_property
    def _formula_tensors(self) -> dict[str, Tensor]:
        with force_kernel("written"):
            return self._compared_tensors()

    @cached_property
    def bound(self) -> float:
        return max(_ACCEPTED_ERROR, _ERROR_RATIO * relative_error(self._formula_tensors, self._exact_tensors))

    def damage_text(self) -> str:
        """Return what has changed, in words; empty if the written formula still gives the same result."""
        try:
            with force_kernel("written"):
                again = self._compared_tensors()
            same = (
                again.keys() == self._formula_tensors.keys()
                and relative_error(again, self._formula_tensors) <= self.bound
            )
        except BaseException as failed:  # any error of a device that can no longer be used
            return f"afterwards the written formula failed: {error_text(failed)}"
        return "" if same else "afterwards the written formula computed something else"

    def try_kernel(self, unit: TrialUnit) -> TriedKernel:
        try:
            with force_kernel(unit.kernel, unit.place):
                error = relative_error(self._compared_tensors(), self._exact_tensors)
        except BaseException as failed:  # SystemExit, too, which a library may raise
            return self.result_with_failure(unit, error_text(failed))
        return replace(self.result_with_failure(unit, ""), error=error)

    def result_with_failure(self, unit: TrialUnit, why: str) -> TriedKernel:
        by_device = (unit.place, unit.kernel) in _DRAW_BY_DEVICE and self.subject.device.type != "cpu"
        comparable, failure = not (unit.dropped and by_device), why[:MAX_ERROR_CHARACTERS]
        return TriedKernel(unit.kernel, unit.dropped, None, self.bound, comparable, failure, unit.place)


class _UpdateTrial(_Trial):
    """A trial of two updates by StableAdamW of a flat tensor in fp32, of which the second is clipped."""

    def __init__(self, subject: TrialSubject) -> None:
        self.subject, self._dropped = subject, False

    def _request_kernels(self) -> None:
        self._compared_tensors()

    def _compared_tensors(self, *, exact: bool = False) -> dict[str, Tensor]:
        draws, edges = torch.Generator().manual_seed(1), [0, *accumulate(_PARAMETER_SIZES)]
        dtype = torch.float64 if exact else torch.float32
        start, *given = (torch.randn(edges[-1], generator=draws) for _ in range(3))
        # Small weights that decay fast: what an update adds is not rounded away.
        flat = nn.Parameter((0.01 * start).to(self.subject.device, dtype))
        ranges = [ShardSegment(number, 0, *ends) for number, ends in enumerate(pairwise(edges))]
        optimizer = StableAdamW([flat], StableAdamWConfig(lr=0.1, weight_decay=10.0))
        optimizer.shard({flat: ranges}, [(size,) for size in _PARAMETER_SIZES])
        for count, gradient in enumerate(given, start=1):
            flat.grad = (gradient * 10.0**count).to(flat)
            set_update(optimizer, lr=0.1, count=count)
            optimizer.step()
        found = {"weight": flat.detach(), **optimizer.state[flat]}
        return {f"{kind} {its.parameter}": its.view_in(x).double() for kind, x in found.items() for its in ranges}


def _as_causal(batch: Batch) -> Batch:
    """Return the rows as causal ones; their first tokens are no targets."""
    at_M = batch.target_positions[batch.positions[batch.target_positions] > 0]
    return replace(batch, causal=True, target_positions=at_M, target_ids=batch.tokens[at_M])
