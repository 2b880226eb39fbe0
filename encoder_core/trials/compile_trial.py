"""Compiles the layers of a run's networks before training, and compares the results with those of uncompiled layers.

A network of the family, two layers deep, computes loss and gradients uncompiled and compiled, with the same random
draws. In half precision the two round differently, so both are compared with fp32, and the uncompiled error decides how
large the compiled error may be. The run's layers reuse the code compiled here, because torch caches compiled code by
its source. Passes with gradients are compiled once, for rows of the run's shape. Passes without gradients (evaluation,
recomputing XLNet's memory, the first pass of a contrastive step) are rare or fast, so compiling them at every start is
not worth the time, and they run uncompiled.

A compiler may raise an error, hang, use all memory or end its process. So a run compiles first in a separate process,
and then in its own, from the folder in which both cache compiled code (`TORCHINDUCTOR_CACHE_DIR`).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.pieces import Pieces, compile_layers
from encoder_core.layers.torch_internals import compiled_graph_count
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.trials.trial_network import (
    TrialSubject,
    apply_settings,
    build_module,
    compute_gradients,
    random_batch,
    relative_error,
    shrink_network,
    torch_settings,
)
from encoder_core.trials.trial_process import (
    Deadline,
    Report,
    TrialConnection,
    TrialEnded,
    error_text,
    run_trial_process,
)

TRIAL_FUNCTION = "encoder_core.trials.compile_trial:serve"  # what the separate process runs
_MAX_ERROR = 1e-4  # largest relative error of a compiled gradient in fp32
_ERROR_RATIO = 4.0  # largest error of a compiled gradient in half precision / error of the uncompiled gradient
_SMALL_BATCH_TOKENS = 64  # tokens of the small batch
_CPU_TOKENS = 4160  # tokens of the large batch on a CPU, where inductor sums more than 4,096 elements differently
_REASON_CHARACTERS = 2000  # largest number of characters of a failure's text


@dataclass(frozen=True)
class TriedCompilation:
    """The result of a trial compilation.

    Attributes:
        seconds: duration of the compilation, including the comparison.
        graphs: number of compiled graphs; a forward and its backward graph count as one.
        error: relative error of the gradient that comes closest to its bound; None if nothing was compared, or the
            compilation failed.
        bound: largest error allowed for this gradient.
        failure: the compiler's error; empty if it succeeded.
    """

    seconds: float
    graphs: int = 0
    error: float | None = None
    bound: float = 0.0
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return not self.failure and (self.error is None or self.error <= self.bound)


def try_in_process(subject: TrialSubject, patience_s: float, tick: Callable[[], None]) -> TriedCompilation:
    """Compile in a separate process, with this process's environment and torch settings, and return the result.

    A failure of the separate process is returned in the result, never raised. `patience_s`: time limit. `tick` is
    called about twice a second.
    """
    began = time.monotonic()
    request = {"subject": subject.to_json(), "settings": torch_settings()}
    try:
        with closing(run_trial_process(TRIAL_FUNCTION, request, Deadline(patience_s), tick)) as reports:
            found = TriedCompilation(**next(reports)["tried"])
    except TrialEnded as ended:
        return TriedCompilation(time.monotonic() - began, failure=str(ended)[:_REASON_CHARACTERS])
    return replace(found, seconds=time.monotonic() - began)


def serve(request: Report, line: TrialConnection) -> None:
    """In the separate process: compile, and report the result."""
    apply_settings(request["settings"])
    line.report(tried=asdict(try_compilation(TrialSubject.from_json(request["subject"]), Pieces())))


def try_compilation(subject: TrialSubject, pieces: Pieces, *, compared: bool = True) -> TriedCompilation:
    """Compile what the subject's networks need, and close `pieces`, so that later steps compile nothing.

    `compared` false: skip the comparison, because an equal machine has made it before.
    """
    began = time.monotonic()
    try:
        with torch.random.fork_rng():
            errors = [error for network in subject.networks for error in _compile(subject, network, pieces, compared)]
    except (Exception, SystemExit) as failed:  # the run continues without compiled layers, and reports why
        return TriedCompilation(time.monotonic() - began, failure=error_text(failed)[:_REASON_CHARACTERS])
    finally:
        pieces.close()
    seconds, graphs = time.monotonic() - began, compiled_graph_count()
    if not errors:
        return TriedCompilation(seconds, graphs)
    worst = max(errors, key=lambda one: one.value / one.bound)
    return TriedCompilation(seconds, graphs, worst.value, worst.bound)


class _GradientError(NamedTuple):
    """The largest relative error of a compiled gradient, and the largest allowed error."""

    value: float
    bound: float


def _compile(subject: TrialSubject, network: ModelConfig, pieces: Pieces, compared: bool) -> Iterator[_GradientError]:
    """Compile one network for the large and the small batch (`_lengths`); if `compared`, yield the error of each."""
    longest = min(network.max_length, max(subject.length, _SMALL_BATCH_TOKENS))
    small = shrink_network(network, longest, longest // 2)
    module = build_module(small, subject).train()
    for lengths in _lengths(subject, small):
        batch = random_batch(small, lengths, subject.device)
        compile_layers(module, pieces)
        found = compute_gradients(module, batch)
        if compared:
            yield _gradient_error(module, batch, found)


def _gradient_error(module: ObjectiveModule, batch: Batch, found: Mapping[str, Tensor]) -> _GradientError:
    """Return the error of `found`, gradients that compiled layers have computed."""
    compile_layers(module, None)
    python = compute_gradients(module, batch)
    if next(module.parameters()).dtype == torch.float32:
        return _GradientError(relative_error(found, python), _MAX_ERROR)
    exact = compute_gradients(deepcopy(module).float(), batch)
    return _GradientError(relative_error(found, exact), max(_MAX_ERROR, _ERROR_RATIO * relative_error(python, exact)))


def _lengths(subject: TrialSubject, network: ModelConfig) -> list[list[int]]:
    """Return the row lengths of a large and of a small batch. They do not depend on the run's data."""
    length = min(subject.length, network.max_length)
    tokens = subject.rows * length
    if subject.device.type == "cpu":
        tokens = min(tokens, _CPU_TOKENS)
    large = [length] * max(1, -(-tokens // length))
    few = min(length, _SMALL_BATCH_TOKENS)
    return [large, [few] if network.permutes else [few // 2, few - few // 2]]
