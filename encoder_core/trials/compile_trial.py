"""Compiles the layers of a run's networks before it trains, and compares them with what Python computes.

A network of the family, two layers deep, computes loss and gradients as Python and compiled, with the same draws. What
it compiles is what the run's own layers use afterwards: torch keeps compiled code by what it was made of. Everything
that has gradients is done once, on rows of the run's shape. What has none (evaluation, XLNet's memory made again, the
first pass of a contrastive step) is rare or quick, not worth its compilation at every start, and stays in Python.

A compiler may raise, hang, take all memory or end its process. So a run compiles first in a process of its own, and
then in its own process, out of the folder that both keep compiled code in (`TORCHINDUCTOR_CACHE_DIR`).
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace

import torch

from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.pieces import Pieces, compile_layers
from encoder_core.layers.torch_internals import graphs_compiled
from encoder_core.trials.trial_network import (
    Subject,
    built,
    gradients,
    random_batch,
    relative_error,
    settings,
    settle,
    smaller,
)
from encoder_core.trials.trial_process import Deadline, Line, Report, TrialEnded, follow, said

TARGET = "encoder_core.trials.compile_trial:serve"
_BOUND = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of a gradient's relative error
_FEW = 64  # tokens of a small batch
_CPU_TOKENS = 4160  # of the large one on a CPU; inductor sums more than 4,096 numbers there in another way
_SAID = 2000  # characters of what went wrong


@dataclass(frozen=True)
class TriedCompilation:
    """What came of it.

    Attributes:
        seconds: that it took. graphs: that were compiled, forward and backward together counting once.
        error: the largest relative error of a gradient; None where it was not compared, or nothing came of it.
        bound: what it may be.
        failure: why nothing came of it, in the compiler's words.
    """

    seconds: float
    graphs: int = 0
    error: float | None = None
    bound: float = 0.0
    failure: str = ""

    @property
    def right(self) -> bool:
        return not self.failure and (self.error is None or self.error <= self.bound)


def try_apart(subject: Subject, patience_s: float, tick: Callable[[], None]) -> TriedCompilation:
    """What a process of its own compiled, with this process's environment and settings of torch. Nothing that happens
    to it is an error here. `tick` is called about twice a second."""
    began = time.monotonic()
    request = {"subject": subject.to_json(), "settings": settings()}
    try:
        with closing(follow(TARGET, request, Deadline(patience_s), tick)) as reports:
            found = TriedCompilation(**next(reports)["tried"])
    except TrialEnded as ended:
        return TriedCompilation(
            time.monotonic() - began, failure=str(ended)[:_SAID], bound=_BOUND[subject.dtype]
        )
    return replace(found, seconds=time.monotonic() - began)


def serve(request: Report, line: Line) -> None:
    """In that process."""
    settle(request["settings"])
    line.report(tried=asdict(try_compilation(Subject.from_json(request["subject"]), Pieces())))


def try_compilation(subject: Subject, pieces: Pieces, *, compared: bool = True) -> TriedCompilation:
    """Compile what the subject's networks need, and close `pieces`. `compared` false: the same was compared before, on
    such a machine."""
    began = time.monotonic()
    bound = _BOUND[subject.dtype]
    try:
        with torch.random.fork_rng():
            errors = [_compile(subject, network, pieces, compared) for network in subject.networks]
    except (Exception, SystemExit) as failed:  # of any kind: the run goes on without, and says why
        return TriedCompilation(time.monotonic() - began, failure=said(failed)[:_SAID], bound=bound)
    finally:
        pieces.close()
    error = max(errors) if compared else None
    return TriedCompilation(time.monotonic() - began, graphs_compiled(), error, bound)


def _compile(subject: Subject, network: ModelConfig, pieces: Pieces, compared: bool) -> float:
    """The largest relative error of a gradient; 0 if nothing is compared."""
    longest = min(network.max_length, max(subject.length, _FEW))
    small = smaller(network, longest, longest // 2)
    module = built(small, subject).train()
    error = 0.0
    for lengths in _lengths(subject, small):
        batch = random_batch(small, lengths, subject.device)
        compile_layers(module, None)
        exact = gradients(module, batch) if compared else {}
        compile_layers(module, pieces)
        found = gradients(module, batch)
        if compared:
            error = max(error, relative_error(found, exact))
    return error


def _lengths(subject: Subject, network: ModelConfig) -> list[list[int]]:
    """Rows of a large batch, and of a small one: always the same ones, whatever batch the run begins with."""
    length = min(subject.length, network.max_length)
    tokens = subject.rows * length
    if subject.device.type == "cpu":
        tokens = min(tokens, _CPU_TOKENS)
    large = [length] * max(1, -(-tokens // length))
    few = min(length, _FEW)
    return [large, [few] if isinstance(network, XlnetConfig) else [few // 2, few - few // 2]]
