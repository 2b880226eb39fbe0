"""`Stream` computes sample `n` of epoch `e` in this process; the data service delivers the same samples. A window of
samples is built from its blocks: they are read, cut into rows, masked and ordered, and the result is cut
into slabs.

A slab is a part of a window that is sent by itself. `SlabLayout` says which sample lies in which slab. A rank reads
the same rows of every step. So a slab holds a stripe: the same rows of every step of the window. Then a node pulls
only the few slabs in which its ranks' rows lie. The layout does not change the samples, and does not depend on the
ranks, so it remains valid when ranks join or leave.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_service.errors import CorpusError
from data_service.result_cache import RecentResults
from data_service.samples.make import cut_block, cutting_key, make_rows, masking_key, token_ranges_of_row
from data_service.samples.masking import MlmMasking
from data_service.samples.samples import Samples, distribute_rows, join_rows, slice_rows
from data_service.samples.spec import StreamSpec
from data_service.store.base import Store
from data_service.stream.counts import RowCounter
from data_service.stream.exposure import SampleFinder, TokenRange
from data_service.stream.plan import BlockRows, EpochLayout, Window
from data_service.stream.sources import Corpora
from data_service.stream.stages import make_plan
from data_service.stream.token_axis import TokenAxis
from data_service.types import Block, Tokens

_CONCURRENT_READS = 16  # blocks read ahead, about 10 MB: they arrive while earlier blocks are processed


class StepStart(NamedTuple):
    """The steps in which a stream is read: `rows` samples each, and one of them begins at `sample` of `epoch`."""

    rows: int
    epoch: int
    sample: int


class SlabLayout(NamedTuple):
    """The division of a window's samples into slabs.

    Attributes:
        size: number of samples in the window.
        step: number of samples in a step; `size` if it is not known, and then slabs are consecutive samples.
        begin: position of the window's first sample in its step.
        stripe: number of samples of each step in a slab; the last slab may have fewer.
    """

    size: int
    step: int
    begin: int
    stripe: int

    @classmethod
    def from_slab_rows(cls, size: int, rows: int) -> "SlabLayout":
        """Return a layout with slabs of `rows` consecutive samples."""
        return cls(size, size, 0, min(size, rows))

    @classmethod
    def for_window(
        cls, epoch_layout: EpochLayout, epoch: int, window: int, *, rows: int, steps: StepStart | None = None
    ) -> "SlabLayout":
        """Return a layout with slabs of about `rows` samples for a window that is read in `steps`.

        Slabs are consecutive samples if `steps` is None or a step is larger than the window.
        """
        size = epoch_layout.window_size(window)
        if steps is None or steps.rows > size:
            return cls.from_slab_rows(size, rows)
        epochs = (epoch - steps.epoch) * epoch_layout.samples_per_epoch
        begin = (epochs + epoch_layout.window_start(window) - steps.sample) % steps.rows
        slabs = max(1, -(-size // rows))
        return cls(size, steps.rows, begin, -(-steps.rows // slabs))

    @property
    def slab_count(self) -> int:
        """Number of slabs. Each has at least one sample."""
        return -(-self.step // self.stripe)

    def slab_positions(self, slab: int) -> NDArray[np.int64]:
        """Return [N] int64, the positions in the window of a slab's samples, ascending."""
        first = slab * self.stripe
        stripe = np.arange(first, min(first + self.stripe, self.step))
        steps = -(-(self.begin + self.size) // self.step)
        found = (np.arange(steps)[:, None] * self.step + stripe - self.begin).ravel()
        return found[(found >= 0) & (found < self.size)]

    def iter_slab_ranges(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield (slab, start, stop): the ranges of slabs with samples `first` to `last` of the window, in order."""
        while first < last:
            step, row = divmod(first + self.begin, self.step)
            slab = row // self.stripe
            base = slab * self.stripe
            width = min(self.stripe, self.step - base)
            missing = min(max(self.begin - base, 0), width)  # samples of the stripe that come before the window
            start = step * width - missing + row - base
            count = min(last - first, base + width - row)
            yield slab, start, start + count
            first += count

    def slabs_with_samples(self, first: int, last: int) -> list[int]:
        """Return the slabs that hold samples `first` to `last` of the window, in the order in which they are needed."""
        end = min(last, first + self.step)  # one step has samples in every slab, so later steps add none
        return list(dict.fromkeys(slab for slab, _, _ in self.iter_slab_ranges(first, end)))


def rows_per_slab(length: int, slab_tokens: int = 1 << 19) -> int:
    """Return the number of rows of `length` tokens in a slab of `slab_tokens`. A slab of the default size fits in a
    processor's cache while it is made."""
    return max(1, slab_tokens // length)


def build_window(corpora: Corpora, window: Window, layout: SlabLayout) -> list[Samples]:
    """Return a window's samples in the slabs of `layout`.

    Raises:
        CorruptBlock, StoreError: a block cannot be read.
    """
    rows = window.order.items_at(np.arange(window.order.size))
    rates = iter(_mask_rates(corpora.spec, window, rows))
    made = [
        _make_block_samples(corpora, piece, block, next(rates)) for piece, block in _read_ahead(corpora, window.pieces)
    ]
    joined = join_rows(made)
    del made
    return distribute_rows(joined, (rows[layout.slab_positions(slab)] for slab in range(layout.slab_count)))


def _mask_rates(spec: StreamSpec, window: Window, rows: NDArray[np.int64]) -> list[NDArray[np.float64]] | list[None]:
    """Return for each piece of a window the masking rates of its rows; None if the rate is constant.

    `rows`: [size] int64, for each sample of the window the number of its row, counted through all pieces.
    """
    if spec.annealing is None:
        return [None] * len(window.pieces)
    assert isinstance(spec.masking, MlmMasking)  # a spec has annealing only with MLM
    places = np.empty(len(rows), dtype=np.int64)
    places[rows] = np.arange(len(rows))
    ends = np.cumsum([len(piece) for piece in window.pieces])
    return np.split(spec.annealing.rates_at_samples(spec.masking.rate, window.first + places), ends[:-1])


def _make_block_samples(
    corpora: Corpora, piece: BlockRows, block: Block, rates: NDArray[np.float64] | None = None
) -> Samples:
    spec = corpora.spec
    rows = cut_block(block, spec, cutting_key(spec, piece.source, piece.block, piece.epoch), piece.source)
    if piece.stop > len(rows):
        raise CorpusError(
            f"{spec.sources[piece.source].uri}: block {piece.block} has {len(rows)} rows, "
            f"but the plan needs at least {piece.stop}",
            remedy="delete the cache of row counts, which belongs to another corpus, and start again",
        )
    key = masking_key(spec, piece.source, piece.block, piece.epoch)
    return make_rows(
        block,
        rows,
        start=piece.start,
        stop=piece.stop,
        spec=spec,
        key=key,
        tables=corpora.masking_tables,
        source=piece.source,
        rates=rates,
    )


def _read_ahead(corpora: Corpora, pieces: tuple[BlockRows, ...]) -> Iterator[tuple[BlockRows, Block]]:
    """Yield each piece with its block, in order. Blocks are requested before they are needed."""
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        pending: list[Future[Block]] = []
        for index, piece in enumerate(pieces):
            for ahead in pieces[index + len(pending) : index + _CONCURRENT_READS]:
                pending.append(pool.submit(corpora.read_source_block, ahead.source, ahead.block))
            yield piece, pending.pop(0).result()


@dataclass(frozen=True)
class SampleText:
    """The text of a sample, and where it is in a source.

    Attributes:
        name, languages, uri: name, languages and corpus URI of the source.
        epoch: number of the pass over the source, from 0.
        stretches: ranges of the block's tokens in the row: one range, or one for each of its segments or texts.
        tokens: the tokens of `stretches`, before masking and without special tokens.
    """

    name: str
    languages: tuple[str, ...]
    uri: str
    block: int
    row: int
    epoch: int
    stretches: tuple[range, ...]
    tokens: Tokens


class Stream:
    """Computes a spec's samples in this process. It keeps the last windows that it built.

    `cache`: store that keeps row counts between runs; None to count again. `windows`: number of windows to keep in
    memory.

    Raises:
        CorpusError: a corpus is missing or does not fit the spec.
        PlanError: no samples can be made from the corpora.
        StoreError: a store cannot be read.
    """

    def __init__(self, spec: StreamSpec, cache: Store | None = None, windows: int = 2) -> None:
        self.spec = spec
        self._corpora = Corpora(spec)
        self._counter = RowCounter(cache)
        self._counts = self._counter.count_rows(self._corpora)
        self.plan = make_plan(self._corpora, self._counts, self._counter)
        self._kept: RecentResults[tuple[int, int], list[Samples]] = RecentResults(windows)
        self._slab_rows = rows_per_slab(spec.row_length)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in an epoch, the same in every epoch."""
        return self.plan.epoch_layout.samples_per_epoch

    def read(self, epoch: int, start: int, stop: int) -> Samples:
        """Return samples `start` to `stop` (at least one) of an epoch. Raises IndexError: a sample is not in it."""
        if start >= stop:
            raise IndexError(f"the range of samples from {start} to {stop} is empty")
        return join_rows(
            [
                slice_rows(self._window_slabs(epoch, window)[slab], low, high)
                for window, first, last in self.plan.epoch_layout.split_by_window(start, stop)
                for slab, low, high in self._layout(window).iter_slab_ranges(first, last)
            ]
        )

    def token_axis(self) -> TokenAxis:
        """Return the stream's axis in tokens. This measures the length of every row unless the lengths are cached."""
        return TokenAxis(self.plan, self._counts, self._counter.measure_rows(self._corpora))

    def sample_text(self, epoch: int, sample: int) -> SampleText:
        """Return the text of a sample and where it comes from."""
        origin = self.plan.origin_of_sample(epoch, sample)
        block = self._corpora.read_source_block(origin.source, origin.block)
        key = cutting_key(self.spec, origin.source, origin.block, origin.epoch)
        rows = cut_block(block, self.spec, key, origin.source)
        corpus = self.spec.sources[origin.source]
        drawn = masking_key(self.spec, origin.source, origin.block, origin.epoch)
        stretches = token_ranges_of_row(block, rows, origin.row, self.spec, drawn)
        return SampleText(
            name=corpus.name,
            languages=corpus.languages,
            uri=corpus.uri,
            block=origin.block,
            row=origin.row,
            epoch=origin.epoch,
            stretches=stretches,
            tokens=np.concatenate([block.tokens[part.start : part.stop] for part in stretches]),
        )

    def find(self, places: Sequence[TokenRange], epochs: range) -> Iterator[tuple[TokenRange, int, int]]:
        """Yield the samples of `epochs` that hold a token of `places` (see `SampleFinder.find_samples`)."""
        return SampleFinder(self.plan, self._corpora).find_samples(places, epochs)

    def _layout(self, window: int) -> SlabLayout:
        """Return the division of a window into slabs of consecutive samples."""
        return SlabLayout.from_slab_rows(self.plan.epoch_layout.window_size(window), self._slab_rows)

    def _window_slabs(self, epoch: int, window: int) -> list[Samples]:
        def build_slabs() -> list[Samples]:
            return build_window(self._corpora, self.plan.window(epoch, window), self._layout(window))

        return self._kept.get((epoch, window), build_slabs)
