"""Gradients added up during the backward pass, and after it, as DeepSpeed does. For `run_ranks`."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from encoder_core.train.engine_config import EngineConfig
from encoder_core.train.overlap import OverlappedSums
from tests.support.ranks import small_training as small
from tests.support.ranks.small_training import Setting, Trace


@contextmanager
def after_backward() -> Iterator[None]:
    """Engines that are made here leave it to DeepSpeed."""
    with patch.object(EngineConfig, "sums_apart", False):
        yield


def both(
    rank: int, world: int, settings: list[Setting]
) -> tuple[list[Trace], list[Trace], list[tuple[int, int]]]:
    """Some steps during and after; and of each sum, buckets begun by the end of the backward pass, and all."""
    begun: list[tuple[int, int]] = []
    finish = OverlappedSums.finish

    def noted(self: OverlappedSums) -> None:
        begun.append((self._next, len(self._buckets)))
        finish(self)

    with patch.object(OverlappedSums, "finish", noted):
        during = small.train(rank, world, settings, 0, 3, poisoned=1)
    with after_backward():
        after = small.train(rank, world, settings, 0, 3, poisoned=1)
    return during, after, begun
