"""Compiles the layers of a run's networks before it trains, and compares them with what Python computes.

A network of the family, two layers deep, computes loss and gradients as Python and compiled, with the same draws. What
it compiles is what the run's own layers use afterwards: torch keeps compiled code by what it was made of. Everything
that has gradients is done once, on rows of the run's shape. What has none (evaluation, XLNet's memory made again, the
first pass of a contrastive step) is rare or quick, not worth its compilation at every start, and stays in Python.
"""

import time
from dataclasses import dataclass

import torch

from encoder_core.cost.trial_network import (
    Subject,
    built,
    gradients,
    random_batch,
    relative_error,
    smaller,
)
from encoder_core.families.build import ModelConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.pieces import Pieces, compile_layers

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


def try_compilation(subject: Subject, pieces: Pieces, *, compared: bool = True) -> TriedCompilation:
    """Compile what the subject's networks need, and close `pieces`. `compared` false: the same was compared before, on
    such a machine."""
    began = time.monotonic()
    bound = _BOUND[subject.dtype]
    try:
        with torch.random.fork_rng():
            errors = [_compile(subject, network, pieces, compared) for network in subject.networks]
    except Exception as failed:  # of any kind: the run goes on without, and says why
        text = f"{type(failed).__name__}: {failed}"[:_SAID]
        return TriedCompilation(time.monotonic() - began, failure=text, bound=bound)
    finally:
        pieces.close()
    error = max(errors) if compared else None
    return TriedCompilation(time.monotonic() - began, _graphs(), error, bound)


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


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
