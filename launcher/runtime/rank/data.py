"""A rank's part of each step's data: its microbatches, dealt to ranks round-robin and fetched ahead of time."""

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch

from data_service.samples.samples import Samples, join_rows, slice_rows
from data_service.stream.positions import SampleRange, StepSampleRanges
from data_service.stream.stream import StepStart
from encoder_core.batch import Batch, idle_batch
from encoder_core.train.loop import StepData
from encoder_core.train.settings import MemoryRefresh
from encoder_core.train.step import Microbatch, RankBatch
from launcher.runtime.rank.collate import to_batch
from launcher.runtime.run.streams import StreamLength

STEPS_AHEAD = 2  # number of steps whose rows are read before they are needed
ANNOUNCED_STEPS = 64  # steps that a rank announces to the data service in advance, and again after half of them


class SampleStream(StreamLength, Protocol):
    """A stream of samples as a rank reads it (`data_service.service.client.FeedClient`)."""

    def read(self, epoch: int, start: int, stop: int) -> Samples: ...

    def prefetch(self, ranges: Iterable[tuple[int, int, int]], steps: StepStart | None = None) -> None: ...

    def close(self) -> None: ...


HeldOutText = tuple[Sequence[SampleStream], int]
"""The held-out stream of each phase, and how many of its rows are evaluated. Phases may share a stream."""


@dataclass(frozen=True)
class RankShard:
    """This rank's share of the microbatches of a step: numbers `rank`, `rank + world`, ...

    Attributes:
        rows: rows of a microbatch in each phase.
    """

    rank: int
    world: int
    rows: tuple[int, ...]

    def deal(self, ranges: Sequence[SampleRange]) -> tuple[list[tuple[int, list[SampleRange]]], int]:
        """Cut the step that consists of `ranges` into microbatches. Return this rank's, each as its number and the
        ranges of its rows, and the number of microbatches of all ranks."""
        rows = self.rows[ranges[0].phase] if ranges else 1
        count = -(-sum(r.stop - r.start for r in ranges) // rows)
        return [(i, cut_ranges(ranges, i * rows, rows)) for i in range(self.rank, count, self.world)], count


def cut_ranges(ranges: Sequence[SampleRange], first: int, rows: int) -> list[SampleRange]:
    """Return rows `first` to `first + rows` of the concatenated `ranges`; fewer rows if `ranges` end before."""
    found, base = [], 0
    for r in ranges:
        start, stop = max(first - base, 0), min(first + rows - base, r.stop - r.start)
        if start < stop:
            found.append(SampleRange(r.phase, r.epoch, r.start + start, r.start + stop))
        base += r.stop - r.start
    return found


class RankData:
    """The data of the training loop on one rank.

    Args:
        streams: the stream of each phase.
        positions: map from steps to samples.
        heldout: the held-out texts, by the prefix of their metrics' names.
        share: this rank's share of the microbatches.
        device: device to which batches are copied.
        count: function from a batch to its number of targets for each loss term.
        refresh: when XLNet's memory of earlier rows is recomputed; None if the model has no such memory.
    """

    def __init__(
        self,
        streams: Sequence[SampleStream],
        positions: StepSampleRanges,
        heldout: Mapping[str, HeldOutText],
        share: RankShard,
        device: torch.device,
        count: Callable[[Batch], dict[str, int]],
        refresh: MemoryRefresh | None = None,
    ) -> None:
        self._streams, self._positions, self._heldout = streams, positions, heldout
        self._share, self._device, self._count, self._refresh = share, device, count, refresh
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._rows: dict[int, Future[_ReadStep]] = {}  # reads under way, by step
        self._announced_at: int | None = None
        # Held-out microbatches, by prefix and the first phase with the same stream.
        self._evaluation: dict[tuple[str, int], list[Microbatch]] = {}

    def fetch(self, step: int) -> StepData:
        """Return this rank's microbatches of `step`, and request those of the next steps."""
        before = self._memory_steps(step)
        needed = (*(before or ()), step)
        for number in (*needed, *range(step + 1, min(step + STEPS_AHEAD + 1, self._positions.steps))):
            if number not in self._rows:
                self._rows[number] = self._pool.submit(self._read_step, number)
        requested_s = time.monotonic()
        *_, read = [self._rows[number].result() for number in needed]
        waited = time.monotonic() - requested_s
        work = self._rank_batch(step)
        remember = None if before is None else tuple(self._rank_batch(number) for number in before)
        self._forget_rows(step)
        counts = _add_counts(self._count(m.batch.on_host) for m in work.microbatches)
        return StepData(
            work=work,
            counts=counts or self._count(idle_batch(self._device)),
            tokens=read.tokens,
            digest=read.digest,
            samples=tuple((r.epoch, r.start, r.stop) for r in self._positions.ranges_of_step(step)),
            wait=waited,
            before=remember,
        )

    def set_microbatch_rows(self, phase: int, rows: int) -> None:
        """Set the rows of a microbatch of `phase` from the next fetch on. Call this on all ranks at the same step."""
        cut = (*self._share.rows[:phase], rows, *self._share.rows[phase + 1 :])
        for read in self._rows.values():
            wait([read])  # a read under way would mix the old and the new number of rows
        self._rows.clear()
        self._share, self._announced_at = replace(self._share, rows=cut), None

    def carries_memory(self, step: int) -> bool:
        """Return whether `step` uses the memory that the previous step computed (XLNet). False after the last step."""
        return self._refresh is not None and step < self._positions.steps and self._memory_steps(step) is None

    def microbatch_count(self, step: int) -> int:
        """Return the number of microbatches of `step`, over all ranks."""
        return self._share.deal(self._positions.ranges_of_step(step))[1]

    def microbatch_rows(self, step: int) -> int:
        """Return the number of rows of a full microbatch of `step`."""
        return self._share.rows[self._positions.phase_at_step(step)]

    def heldout_microbatches(self, step: int) -> dict[str, Iterator[Microbatch]]:
        """Return this rank's held-out microbatches for the phase of the last of `step` steps, by the prefix of their
        metrics' names. Rows and masks are the same at every call. A rank with fewer rows adds empty batches, so that
        all ranks make the same number of passes."""
        phase = self._positions.phase_at_step(max(0, step - 1))
        return {prefix: iter(self._heldout_rows(prefix, phase)) for prefix in self._heldout}

    def _heldout_rows(self, prefix: str, phase: int) -> list[Microbatch]:
        streams, rows = self._heldout[prefix]
        number = streams.index(streams[phase])
        if (prefix, number) not in self._evaluation:
            self._evaluation[prefix, number] = self._read_heldout(streams[number], rows)
        return self._evaluation[prefix, number]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        heldout = (stream for streams, _ in self._heldout.values() for stream in streams)
        for stream in (*self._streams, *dict.fromkeys(heldout)):
            stream.close()

    def _memory_steps(self, step: int) -> range | None:
        """Return the steps whose rows are computed again for the model's memory at `step`; None if the memory is
        carried over from the previous step, or the model has none."""
        if self._refresh is None:
            return None
        return self._refresh.recomputed_steps(step, self._positions.first_step_of_phase(step))

    def _rank_batch(self, step: int) -> RankBatch:
        """Return this rank's microbatches of `step` on the device. The copy may overlap the previous step."""
        read = self._rows[step].result()
        moved = (Microbatch(each.index, each.batch.to(self._device)) for each in read.microbatches)
        return RankBatch(step, tuple(moved), self.microbatch_count(step))

    def _forget_rows(self, step: int) -> None:
        """Drop the rows of past steps, except those from which the next step's memory may be recomputed."""
        kept = self._refresh.steps if self._refresh is not None else 0
        for number in [number for number in self._rows if number <= step - kept]:
            del self._rows[number]

    def _read_step(self, step: int) -> "_ReadStep":
        """Read this rank's rows of `step`. This runs on the pool's only thread, so that each stream has a single reader
        and the preparation of rows delays no step."""
        if self._announced_at is None or step - self._announced_at >= ANNOUNCED_STEPS // 2:
            self._announce_steps(step)
        mine, _ = self._share.deal(self._positions.ranges_of_step(step))
        rows, samples = self.microbatch_rows(step), [self._read_samples(ranges) for _, ranges in mine]
        return _ReadStep(
            tuple(
                Microbatch(index, to_batch(each, _CPU, index * rows))
                for (index, _), each in zip(mine, samples, strict=True)
            ),
            tokens=sum(len(each.tokens) for each in samples),
            digest=sum(map(checksum, samples)),
        )

    def _announce_steps(self, step: int) -> None:
        """Tell each stream which rows this rank will read from `step` on, and at which row all ranks' steps begin."""
        self._announced_at = step
        coming = [
            self._positions.ranges_of_step(n) for n in range(step, min(step + ANNOUNCED_STEPS, self._positions.steps))
        ]
        for phase, stream in enumerate(self._streams):
            steps = [ranges for ranges in coming if ranges and ranges[0].phase == phase]
            mine = [r for ranges in steps for _, part in self._share.deal(ranges)[0] for r in part]
            stream.prefetch([(r.epoch, r.start, r.stop) for r in mine], _step_start(steps))

    def _read_samples(self, ranges: Sequence[SampleRange]) -> Samples:
        parts = [self._streams[r.phase].read(r.epoch, r.start, r.stop) for r in ranges]
        return parts[0] if len(parts) == 1 else join_rows(parts)

    def _read_heldout(self, stream: SampleStream, rows: int) -> list[Microbatch]:
        # Held-out rows have the length of the last phase.
        mine, count = self._share.deal([SampleRange(len(self._streams) - 1, 0, 0, rows)])
        found = [
            Microbatch(index, to_batch(stream.read(0, part.start, part.stop), self._device, part.start))
            for index, (part,) in mine
        ]
        idle = -(-count // self._share.world) - len(found)
        return found + [Microbatch(count, idle_batch(self._device))] * idle


@dataclass(frozen=True)
class _ReadStep:
    """This rank's rows of a step, in the host's memory, with the number of their tokens and their checksum."""

    microbatches: tuple[Microbatch, ...]
    tokens: int
    digest: int


_CPU = torch.device("cpu")


def checksum(samples: Samples) -> int:
    """Return the sum, over rows, of the CRC-32 of the model's inputs: tokens, row ends, targets and their positions,
    segments, labels, order. A sum over rows does not depend on how rows are joined."""
    return sum(_row_checksum(slice_rows(samples, row, row + 1)) for row in range(len(samples.offsets) - 1))


def _row_checksum(row: Samples) -> int:
    crc = 0
    for field in fields(row):
        array = getattr(row, field.name)
        crc = crc if array is None else zlib.crc32(array.tobytes(), crc)
    return crc


def _step_start(steps: Sequence[Sequence[SampleRange]]) -> StepStart | None:
    """Return the number of rows in a step (the mean if batches are in tokens), and the epoch and the row at which these
    steps begin in their stream. None without steps."""
    if not steps:
        return None
    first, rows = steps[0][0], sum(r.stop - r.start for ranges in steps for r in ranges)
    return StepStart(max(1, round(rows / len(steps))), first.epoch, first.start)


def _add_counts(counts: Iterator[dict[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for count in counts:
        total.update(count)
    return dict(total)
