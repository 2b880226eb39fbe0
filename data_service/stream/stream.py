"""`Stream`: computes sample `n` of epoch `e` in this process. It defines what the service delivers."""

from dataclasses import dataclass

from data_service.recent import RecentResults
from data_service.samples.make import cut, structure_key
from data_service.samples.samples import Samples, join_rows, slice_rows
from data_service.samples.spec import StreamSpec
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.stream.counts import count_rows, measure_rows
from data_service.stream.sources import Corpora, Opener
from data_service.stream.stages import make_plan
from data_service.stream.token_axis import TokenAxis
from data_service.stream.window import SlabLayout, build_window, slab_rows
from data_service.types import Tokens


@dataclass(frozen=True)
class SampleText:
    """The text behind a sample.

    Attributes:
        name, languages, uri: the corpus.
        block, row: where in it.
        epoch: how many times the corpus had been read before.
        stretches: the tokens of the block that the row holds: one stretch, or its segments or texts in order.
        tokens: those tokens, before masking and without special ones.
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
    """One process's view of a spec's samples. Keeps the last windows it built.

    Args:
        spec: which samples.
        opener: from URI to store.
        cache: where row counts are kept between runs; None to count anew.
        windows: how many windows to keep in memory.

    Raises:
        CorpusError, PlanError, StoreError: corpora that are not there, or from which nothing can be made.
    """

    def __init__(
        self, spec: StreamSpec, opener: Opener = open_store, cache: Store | None = None, windows: int = 2
    ) -> None:
        self.spec = spec
        self._corpora = Corpora(spec, opener)
        self._cache = cache
        self._counts = count_rows(self._corpora, cache)
        self.plan = make_plan(self._corpora, self._counts, cache)
        self._kept: RecentResults[tuple[int, int], list[Samples]] = RecentResults(windows)
        self._slab_rows = slab_rows(spec.row_length)

    @property
    def samples_per_epoch(self) -> int:
        """The same in every epoch."""
        return self.plan.epoch_layout.samples_per_epoch

    def read(self, epoch: int, start: int, stop: int) -> Samples:
        """Samples `start` to `stop` (at least one) of an epoch. Raises IndexError outside the epoch."""
        if start >= stop:
            raise IndexError(f"no samples from {start} to {stop}")
        return join_rows(
            [
                slice_rows(self._window(epoch, window)[slab], low, high)
                for window, first, last in self.plan.epoch_layout.spans(start, stop)
                for slab, low, high in self._layout(window).pieces(first, last)
            ]
        )

    def token_axis(self) -> TokenAxis:
        """The stream measured in tokens; the first time, its rows' lengths are counted."""
        return TokenAxis(self.plan, self._counts, measure_rows(self._corpora, self._cache))

    def source(self, epoch: int, sample: int) -> SampleText:
        """Where a sample's text comes from."""
        origin = self.plan.origin(epoch, sample)
        block = self._corpora.read(origin.source, origin.block)
        key = structure_key(self.spec, origin.source, origin.block, origin.epoch)
        rows = cut(block, self.spec, key, origin.source)
        corpus = self.spec.sources[origin.source]
        return SampleText(
            name=corpus.name,
            languages=corpus.languages,
            uri=corpus.uri,
            block=origin.block,
            row=origin.row,
            epoch=origin.epoch,
            stretches=rows.stretches(origin.row),
            tokens=rows.text(block, origin.row, origin.row + 1),
        )

    def _layout(self, window: int) -> SlabLayout:
        return SlabLayout.sliced(self.plan.epoch_layout.size(window), self._slab_rows)

    def _window(self, epoch: int, window: int) -> list[Samples]:
        def build() -> list[Samples]:
            return build_window(self._corpora, self.plan.window(epoch, window), self._layout(window))

        return self._kept.get((epoch, window), build)
