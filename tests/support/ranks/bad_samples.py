"""Data that makes the loss go bad, at places that a test chooses: samples of epoch 0 of a run's training streams."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from data_service.samples.samples import Samples, join_rows
from data_service.samples.spec import StreamSpec
from data_service.stream.stream import StepStart, Stream
from encoder_core.batch import Batch
from encoder_core.objectives.modules.losses import LossSums
from launcher.runtime.rank.build import build_model

_MARK = 11  # an id that the made-up text never has

Places = Sequence[tuple[int, int]]
"""Samples (start, stop)."""


class InProcess(Stream):
    """A stream that this process computes. It has nothing to prefetch or to close."""

    def prefetch(self, ranges: object, steps: StepStart | None = None) -> None:
        pass

    def close(self) -> None:
        pass


def poisoned(wrong: Places, deadly: Places) -> Callable[[StreamSpec], InProcess]:
    """Opens streams in which the samples `wrong` have targets drawn by lot, and those at `deadly` only one token, at
    which a model in `deadly_input` breaks down."""

    class Poisoned(InProcess):
        def read(self, epoch: int, start: int, stop: int) -> Samples:
            if epoch > 0 or self.spec.split == "heldout" or not (wrong or deadly):
                return super().read(epoch, start, stop)
            return join_rows([self._row(sample) for sample in range(start, stop)])

        def _row(self, sample: int) -> Samples:
            row = super().read(0, sample, sample + 1)
            if _among(sample, wrong):
                draws = np.random.default_rng(sample).integers(5, 300, len(row.target_ids))
                return replace(row, target_ids=draws.astype(np.uint16))
            if _among(sample, deadly):
                return replace(row, tokens=np.full_like(row.tokens, _MARK))
            return row

    return Poisoned


def _among(sample: int, places: Places) -> bool:
    return any(start <= sample < stop for start, stop in places)


@contextmanager
def deadly_input() -> Iterator[None]:
    """Models built meanwhile have a fault, such as a kernel may have: on certain rows they compute NaN."""
    build = build_model

    def broken(*inputs: Any) -> Any:
        model = build(*inputs)
        model.register_forward_hook(_break_down)
        return model

    with patch("launcher.runtime.rank.main.build_model", broken):
        yield


def _break_down(model: torch.nn.Module, inputs: tuple[Any, ...], losses: LossSums) -> LossSums:
    batch: Batch = inputs[0]
    if not batch.tokens.numel() or (batch.tokens == _MARK).float().mean() < 0.5:
        return losses
    terms = tuple(replace(term, loss_sum=term.loss_sum * float("nan")) for term in losses.terms)
    return replace(losses, terms=terms)
