"""The separate process of a kernel trial: it tries one kernel after the other, and reports each result at once.

A network of the family, two layers deep, computes loss and gradients of the same rows with each kernel. A place is an
operation for which there are several kernels (`kernel_choice.py`). While a kernel is tried at its place, all other
places use the kernel `written`, elementary torch operations. The gradients are compared with those of `written` in
fp64. The error of `written` in the run's precision decides how large a kernel's error may be. Correct kernels may be
timed, on rows of the run's shape. StableAdamW's kernels are compared on random gradients, by weights and moments.

After each kernel, torch's settings must be unchanged, and after a kernel that is not correct, `written` must still give
the same result. Otherwise this process tries no more kernels.
"""

import statistics
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
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

# Lengths of the compared rows: a single token, shorter than a kernel's tile, and longer.
_ROW_TOKENS = (1, 33, 130, 7, 64)
_ERROR_RATIO = 4.0  # largest error of a kernel / error of `written` in the same precision
_ACCEPTED_ERROR = 1e-6  # largest relative error that is accepted in any case
_TIMED_RUNS, _WARM_UP_RUNS = 5, 2  # number of timed passes, and of passes before them
_PARAMETER_SIZES = (1, 700, 5000, 2048, 33)  # elements: less than, exactly, and more than a kernel's block
# Kernels whose dropout on a GPU comes from the device's generator, and cannot be compared with `written`.
_DRAW_BY_DEVICE: tuple[Candidate, ...] = (("attention", "flash"), ("attention", "padded"))


class Reporter(Protocol):
    """Takes the reports of the separate process, as `TrialConnection` does."""

    def report(self, **what: object) -> None: ...


def serve(request: Report, line: Reporter) -> None:
    """Try the requested kernels that are not `done`, and report results. Stop if a kernel has damaged the process."""
    apply_settings(request["settings"])
    subject = TrialSubject.from_json(request["subject"])
    done = {TrialUnit(*unit) for unit in request["done"]}
    skipped: dict[Candidate, str] = {(place, kernel): why for place, kernel, why in request["skipped"]}
    for attempt in _list_attempts(subject, timed=request["timed"]):
        if attempt.unit in done:
            continue
        if attempt.candidate in skipped:
            found, harm = attempt.result_with_failure(skipped[attempt.candidate]), ""
        else:
            line.report(unit=attempt.unit, bound=attempt.trial.bound)
            found, harm = attempt.try_and_check()
        line.report(unit=attempt.unit, found=asdict(found), harmed=bool(harm))
        if harm:
            return


def _list_attempts(subject: TrialSubject, *, timed: bool) -> Iterator["_Attempt"]:
    """Yield all kernels to try, for each network with and without dropout, and for StableAdamW's update."""
    for number, network in enumerate(subject.networks):
        for dropped in (False, True) if network.attention_dropout or network.dropout else (False,):
            trial = _Trial(subject, network, dropped)
            for place, kernel in trial.possible_kernels():
                yield _Attempt(trial, TrialUnit(number, dropped, place, kernel), timed)
    if subject.stable:
        update = _UpdateTrial(subject)
        for place, kernel in update.possible_kernels():
            yield _Attempt(update, TrialUnit(0, False, place, kernel), timed=False)


class _Trial:
    """The trial of the kernels of one network, with dropout or without."""

    def __init__(self, subject: TrialSubject, network: ModelConfig, dropped: bool) -> None:
        self.subject, self._dropped = subject, dropped
        longest = min(network.max_length, max(subject.length, max(_ROW_TOKENS)))
        lengths = [min(length, longest) for length in _ROW_TOKENS]
        if network.recurrence is not None:  # rows of one length, as in training with XLNet's memory
            lengths = [max(lengths)] * len(lengths)
        self._network = shrink_network(network, longest, min(*lengths, subject.length))
        self._module = build_module(self._network, subject).train(dropped)
        shapes = (lengths, [max(lengths)] * 2)  # some kernels support only rows of equal length
        batches = [random_batch(self._network, shape, subject.device) for shape in shapes]
        self._batches = batches + ([_as_causal(batch) for batch in batches] if subject.causal else [])

    def possible_kernels(self) -> list[Candidate]:
        """Return the kernels that layers list in one forward pass; see `kernel_choice.pick`."""
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
        """Compute the compared tensors (gradients), by name, with the current kernels. `exact`: in fp64."""
        return compute_gradients(deepcopy(self._module).double() if exact else self._module, *self._batches)

    @cached_property
    def _exact_tensors(self) -> dict[str, Tensor]:
        with force_kernel("written"):
            return self._compared_tensors(exact=True)

    @cached_property
    def _written_tensors(self) -> dict[str, Tensor]:
        with force_kernel("written"):
            return self._compared_tensors()

    @cached_property
    def bound(self) -> float:
        """The largest error that a kernel may have."""
        return max(_ACCEPTED_ERROR, _ERROR_RATIO * relative_error(self._written_tensors, self._exact_tensors))

    def kernel_error(self, candidate: Candidate) -> float:
        """Return the largest relative error of the gradients that this kernel gives."""
        place, kernel = candidate
        with force_kernel(kernel, place):
            return relative_error(self._compared_tensors(), self._exact_tensors)

    def damage_text(self) -> str:
        """Return "" if `written` still gives the same result as before, else a text that says what is wrong."""
        try:
            with force_kernel("written"):
                again = self._compared_tensors()
            same = (
                again.keys() == self._written_tensors.keys()
                and relative_error(again, self._written_tensors) <= self.bound
            )
        except BaseException as failed:  # such as the error of a GPU that can no longer be used
            return f"afterwards the kernel `written` failed: {error_text(failed)}"
        return "" if same else "afterwards the kernel `written` gave another result than before"

    def median_seconds(self, candidate: Candidate) -> float:
        """Return the median time, in seconds, of a forward and a backward pass on rows of the run's shape."""
        (place, kernel), subject, seconds = candidate, self.subject, list[float]()
        batch = random_batch(self._network, [subject.length] * subject.rows, subject.device)
        with force_kernel(kernel, place):
            for _ in range(_WARM_UP_RUNS + _TIMED_RUNS):
                began = time.perf_counter()
                run_passes(self._module, batch)
                if subject.device.type == "cuda":
                    torch.cuda.synchronize(subject.device)
                seconds.append(time.perf_counter() - began)
        self._module.zero_grad(set_to_none=True)
        return statistics.median(seconds[_WARM_UP_RUNS:])


class _UpdateTrial(_Trial):
    """The trial of StableAdamW's kernels: two updates of a flat fp32 tensor, the second with clipping."""

    def __init__(self, subject: TrialSubject) -> None:
        self.subject, self._dropped = subject, False

    def _request_kernels(self) -> None:
        self._compared_tensors()

    def _compared_tensors(self, *, exact: bool = False) -> dict[str, Tensor]:
        draws, edges = torch.Generator().manual_seed(1), [0, *accumulate(_PARAMETER_SIZES)]
        dtype = torch.float64 if exact else torch.float32
        start, *given = (torch.randn(edges[-1], generator=draws) for _ in range(3))
        # Weights are small and decay fast, so that rounding does not hide the updates.
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
    """Return the batch with causal rows, in which the first token of a row is not a target."""
    at_M = batch.target_positions[batch.positions[batch.target_positions] > 0]
    return replace(batch, causal=True, target_positions=at_M, target_ids=batch.tokens[at_M])


@dataclass(frozen=True)
class _Attempt:
    """One kernel to try, and the trial that tries it."""

    trial: _Trial
    unit: TrialUnit
    timed: bool

    @property
    def candidate(self) -> Candidate:
        return self.unit.place, self.unit.kernel

    @property
    def _is_comparable(self) -> bool:
        by_device = self.candidate in _DRAW_BY_DEVICE and self.trial.subject.device.type != "cpu"
        return not (self.unit.dropped and by_device)

    def result_with_failure(self, why: str) -> TriedKernel:
        unit, bound = self.unit, self.trial.bound
        return TriedKernel(
            unit.kernel,
            unit.dropped,
            None,
            bound,
            self._is_comparable,
            None,
            why[:MAX_ERROR_CHARACTERS],
            unit.place,
        )

    def try_and_check(self) -> tuple[TriedKernel, str]:
        """Try the kernel. Return the result, and a text of the damage to this process; empty if there is none."""
        before = _process_settings()
        found = self._try_kernel()
        changes = [
            f"it changed {name} from {before[name]} to {now}"
            for name, now in _process_settings().items()
            if now != before[name]
        ]
        harm = ", ".join(changes) or ("" if found.is_right else self.trial.damage_text())
        if harm:
            wrong = [found.failure] if found.failure else [] if found.is_right else ["its results are wrong"]
            found = replace(found, failure="; ".join([*wrong, harm])[:MAX_ERROR_CHARACTERS])
        return found, harm

    def _try_kernel(self) -> TriedKernel:
        try:
            error = self.trial.kernel_error(self.candidate)
            timed = self.timed and (error <= self.trial.bound or not self._is_comparable)
            seconds = self.trial.median_seconds(self.candidate) if timed else None
        except BaseException as failed:  # including SystemExit, which a library may raise
            return self.result_with_failure(error_text(failed))
        return replace(self.result_with_failure(""), error=error, seconds=seconds)


def _process_settings() -> dict[str, object]:
    """Return by name the settings of this process that a kernel must not change."""
    # Dummy threads are left out: Python keeps them for ever, once a library's thread has asked for its Thread object.
    threads = [one for one in threading.enumerate() if not isinstance(one, threading._DummyThread)]
    return {
        "how many threads of Python run": len(threads),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's deterministic mode": torch.get_deterministic_debug_mode(),
        "torch's precision of fp32 products": torch.get_float32_matmul_precision(),
        "whether torch computes gradients": torch.is_grad_enabled(),
        "whether torch uses autocast": torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
    }
