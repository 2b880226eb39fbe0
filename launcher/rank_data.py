"""A rank's share of each step: the step's rows in logical microbatches, dealt round-robin, fetched ahead of time."""

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from data_service.positions import Positions, Range
from data_service.samples.ragged import Samples
from data_service.samples.rows import join_rows
from encoder_core.batch import Batch
from encoder_core.train.collate import idle_batch, to_batch
from encoder_core.train.loop import Fetched
from encoder_core.train.step import Microbatch, Work
from launcher import session

AHEAD = 2  # steps whose rows are read before they are needed
ANNOUNCED = 64  # steps whose rows the data service is told of, renewed when half of them are done


class SampleStream(session.Measured, Protocol):
    """A stream as ranks read it (`data_service.client.FeedClient`)."""

    def read(self, epoch: int, start: int, stop: int) -> Samples: ...

    def prefetch(self, ranges: Iterable[tuple[int, int, int]]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Share:
    """Which microbatches are this rank's: number `rank`, `rank + world`, ..."""

    rank: int
    world: int
    rows: int

    def deal(self, ranges: Sequence[Range]) -> tuple[list[tuple[int, list[Range]]], int]:
        """This rank's microbatches of a step, each the ranges its rows lie in, and how many the step has."""
        count = -(-sum(r.stop - r.start for r in ranges) // self.rows)
        return [
            (i, cut(ranges, i * self.rows, self.rows)) for i in range(self.rank, count, self.world)
        ], count


def cut(ranges: Sequence[Range], first: int, rows: int) -> list[Range]:
    """Rows `first` to `first + rows` of `ranges` laid end to end; fewer where they end."""
    found, base = [], 0
    for r in ranges:
        start, stop = max(first - base, 0), min(first + rows - base, r.stop - r.start)
        if start < stop:
            found.append(Range(r.phase, r.epoch, r.start + start, r.start + stop))
        base += r.stop - r.start
    return found


class RankData:
    """The training loop's data.

    Args:
        streams: one for each phase.
        positions: from step to samples.
        heldout: the held-out stream, and how many of its rows to evaluate.
        share: this rank's part, and rows per logical microbatch.
        device: where batches go.
        count: targets per loss term of a batch.
    """

    def __init__(
        self,
        streams: Sequence[SampleStream],
        positions: Positions,
        heldout: tuple[SampleStream, int],
        share: Share,
        device: torch.device,
        count: Callable[[Batch], dict[str, int]],
    ) -> None:
        self._streams, self._positions, self._heldout = streams, positions, heldout
        self._share, self._device, self._count = share, device, count
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._ahead: dict[int, Future[list[tuple[int, Samples]]]] = {}
        self._announced_at: int | None = None
        self._evaluation: list[Microbatch] | None = None

    def fetch(self, step: int) -> Fetched:
        """This rank's microbatches of `step`; the next steps' are requested meanwhile."""
        for number in range(step, min(step + AHEAD + 1, self._positions.steps)):
            if number not in self._ahead:
                self._ahead[number] = self._pool.submit(self._read_step, number)
        asked = time.monotonic()
        rows = self._ahead.pop(step).result()
        wait = time.monotonic() - asked
        ranges = self._positions.ranges(step)
        batches = [Microbatch(index, to_batch(samples, self._device)) for index, samples in rows]
        counts = _add(self._count(m.batch) for m in batches) or self._count(idle_batch(self._device))
        return Fetched(
            work=Work(step, tuple(batches), self._share.deal(ranges)[1]),
            counts=counts,
            tokens=sum(len(samples.tokens) for _, samples in rows),
            digest=sum(checksum(samples) for _, samples in rows),
            samples=tuple((r.epoch, r.start, r.stop) for r in ranges),
            wait=wait,
        )

    def heldout(self) -> Iterator[Microbatch]:
        """The same rows and masks every time. A rank that has none left idles, so that all make as many passes."""
        if self._evaluation is None:
            self._evaluation = self._read_heldout()
        return iter(self._evaluation)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for stream in (*self._streams, self._heldout[0]):
            stream.close()

    def _read_step(self, step: int) -> list[tuple[int, Samples]]:
        """Runs on the pool's one thread, so a stream has one reader."""
        if self._announced_at is None or step - self._announced_at >= ANNOUNCED // 2:
            self._announce(step)
        mine, _ = self._share.deal(self._positions.ranges(step))
        return [(index, self._read(ranges)) for index, ranges in mine]

    def _announce(self, step: int) -> None:
        """Tell each stream what will be read of it, in order."""
        self._announced_at = step
        coming = [
            r
            for number in range(step, min(step + ANNOUNCED, self._positions.steps))
            for r in self._positions.ranges(number)
        ]
        for phase, stream in enumerate(self._streams):
            stream.prefetch((r.epoch, r.start, r.stop) for r in coming if r.phase == phase)

    def _read(self, ranges: Sequence[Range]) -> Samples:
        parts = [self._streams[r.phase].read(r.epoch, r.start, r.stop) for r in ranges]
        return parts[0] if len(parts) == 1 else join_rows(parts)

    def _read_heldout(self) -> list[Microbatch]:
        stream, rows = self._heldout
        mine, count = self._share.deal([Range(0, 0, 0, rows)])
        found = [
            Microbatch(index, to_batch(stream.read(0, part.start, part.stop), self._device))
            for index, (part,) in mine
        ]
        idle = -(-count // self._share.world) - len(found)
        return found + [Microbatch(count, idle_batch(self._device))] * idle


def checksum(samples: Samples) -> int:
    """CRC-32 of what the model sees: inputs, row ends, targets and where they are."""
    crc = 0
    for array in (samples.tokens, samples.offsets, samples.target_positions, samples.target_ids):
        crc = zlib.crc32(array.tobytes(), crc)
    return crc


def _add(counts: Iterator[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for name, value in count.items():
            total[name] = total.get(name, 0) + value
    return total
