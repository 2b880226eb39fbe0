"""`FeedClient`: a rank's view of a stream that the feed delivers. What is lost is asked for again."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import ray

from data_service.errors import UserError
from data_service.feed import EpochWindow, FeedHandle, OpenStream
from data_service.samples.ragged import Samples
from data_service.samples.rows import join_rows
from data_service.spec import StreamSpec
from data_service.store.errors import StoreUnavailable
from data_service.token_axis import TokenAxis
from data_service.window import part_of, slabs_of
from data_service.workers import SlabRefs, cause_of

_LOOK_SECONDS = 2.0
_STORE_ATTEMPTS = 3  # builds of a window, each of which has already retried its requests with patience

SlabKey = tuple[EpochWindow, int]
"""((epoch, window), slab)."""


@dataclass
class _Held:
    """What a client keeps of a window: references to its slabs, and the slabs it has fetched."""

    refs: SlabRefs
    slabs: dict[int, Samples] = field(default_factory=dict)


class FeedClient:
    """Reads one stream. The bytes are those of `Stream.read`, whatever dies on the way.

    One thread reads; another, the client's own, fetches what `prefetch` announced.

    A stream's first opening may count a whole corpus, for hours: `counted` is told meanwhile, every few seconds in
    the waiting thread, how many blocks the feed has gone through.

    Raises:
        CorpusError, PlanError, StoreError: the stream cannot be opened.
    """

    def __init__(
        self, feed: FeedHandle, spec: StreamSpec, counted: Callable[[int], None] | None = None
    ) -> None:
        self.spec = spec
        self.wait_seconds = 0.0
        """Seconds that `read` has waited for samples so far."""
        self._feed = feed
        self._counted = counted
        self._spec_json = spec.model_dump_json()
        self._opened: OpenStream = self._await(feed.open.remote(self._spec_json))
        self._changed = threading.Condition()  # guards what follows
        self._held: dict[EpochWindow, _Held] = {}
        self._coming: Iterator[SlabKey] = iter(())
        self._announced: dict[EpochWindow, dict[int, None]] = {}
        self._reading: set[EpochWindow] = set()
        self._failures: dict[EpochWindow, Exception] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._fetch_announced, name="feed-client", daemon=True)
        self._thread.start()

    @property
    def samples_per_epoch(self) -> int:
        """The same in every epoch."""
        return self._opened.grid.samples_per_epoch

    def token_axis(self) -> TokenAxis:
        """The stream measured in tokens, for batches of so many. The first time, rows' lengths are counted."""
        axis: TokenAxis = self._await(self._feed.token_axis.remote(self._spec_json))
        return axis

    def read(self, epoch: int, start: int, stop: int) -> Samples:
        """Samples `start` to `stop` (at least one) of an epoch. The arrays are read-only.

        Raises:
            IndexError: outside the epoch.
            CorruptBlock, StoreError: a block that cannot be read, even after retries.
        """
        if start >= stop:
            raise IndexError(f"no samples from {start} to {stop}")
        began = time.perf_counter()
        spans = [
            ((epoch, window), first, last) for window, first, last in self._opened.grid.spans(start, stop)
        ]
        with self._changed:
            self._reading = {window for window, _, _ in spans}
            self._move_on()
        parts = [part for window, first, last in spans for part in self._parts(window, first, last)]
        self.wait_seconds += time.perf_counter() - began
        return join_rows(parts)

    def prefetch(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Announce what will be read, as (epoch, start, stop) in order, the current range included.

        Ranges are taken only as far as memory allows, so an iterator may go on to the end of the run. What
        was announced before and is not now is let go.
        """
        with self._changed:
            self._coming = self._slabs_of(ranges)
            self._announced = {}
            self._move_on()

    def close(self) -> None:
        """Stop fetching and let go of everything."""
        with self._changed:
            self._closed = True
            self._coming, self._announced, self._reading = iter(()), {}, set()
            self._move_on()
        self._thread.join()

    def _slabs_of(self, ranges: Iterable[tuple[int, int, int]]) -> Iterator[SlabKey]:
        for epoch, start, stop in ranges:
            for window, first, last in self._opened.grid.spans(start, stop):
                for slab in slabs_of(first, last, self._opened.slab_rows):
                    yield (epoch, window), slab

    def _parts(self, window: EpochWindow, first: int, last: int) -> Iterator[Samples]:
        rows = self._opened.slab_rows
        for slab in slabs_of(first, last, rows):
            yield part_of(self._fetch(window, slab), slab, first, last, rows)

    def _move_on(self) -> None:
        """Drop announced windows that were read past, take up more while memory allows, let go of the rest."""
        if self._reading & self._announced.keys():
            while (first := next(iter(self._announced))) not in self._reading:
                del self._announced[first]
        for window, slab in self._coming:
            if window not in self._announced and len(self._announced) == self._opened.windows_held:
                self._coming = chain([(window, slab)], self._coming)
                break
            self._announced.setdefault(window, {})[slab] = None
        kept = self._reading | self._announced.keys()
        for window in self._held.keys() - kept:
            del self._held[window]
        for window in self._failures.keys() - kept:
            del self._failures[window]
        self._changed.notify()

    def _fetch_announced(self) -> None:
        """The body of the client's thread: fetch, in order, what is announced and not yet here."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next_announced() is not None)
                key = self._next_announced()
            if key is None:
                return
            try:
                self._fetch(*key)
            except (UserError, ray.exceptions.RayError) as error:
                with self._changed:
                    self._failures[key[0]] = error  # raised by the read that needs it

    def _next_announced(self) -> SlabKey | None:
        for window, slabs in self._announced.items():
            held = self._held.get(window)
            missing = (slab for slab in slabs if held is None or slab not in held.slabs)
            if window not in self._failures and (slab := next(missing, None)) is not None:
                return window, slab
        return None

    def _fetch(self, window: EpochWindow, slab: int) -> Samples:
        """One slab, from here or from the object store."""
        attempts = 0
        while True:
            held = self._window(window)
            if slab in held.slabs:
                return held.slabs[slab]
            try:
                samples: Samples = _result(held.refs[slab])
            except ray.exceptions.ObjectLostError:
                self._forget(window, held)
            except StoreUnavailable:
                attempts += 1
                self._forget(window, held)
                if attempts == _STORE_ATTEMPTS:
                    raise
            except UserError:
                self._forget(window, held)  # the build failed, the next need not
                raise
            else:
                held.slabs[slab] = samples
                return samples

    def _window(self, window: EpochWindow) -> _Held:
        """References to a window's slabs, from here or from the feed."""
        with self._changed:
            failure = self._failures.pop(window, None)
            if failure is not None:
                raise failure
            if window in self._held:
                return self._held[window]
            ahead = [announced for announced in self._announced if announced != window]
        answer: dict[EpochWindow, SlabRefs] = _result(
            self._feed.windows.remote(self._spec_json, [window], ahead)
        )
        with self._changed:
            for started in answer.keys() & self._announced.keys():
                self._held.setdefault(started, _Held(answer[started]))
            return self._held.setdefault(window, _Held(answer[window]))

    def _await(self, answer: Any) -> Any:
        """An answer that may take a counting pass. Raises what the feed raised."""
        while self._counted is not None and not ray.wait([answer], timeout=_LOOK_SECONDS)[0]:
            progress = self._feed.progress.remote()
            if ray.wait([progress], timeout=_LOOK_SECONDS)[0]:  # not while the feed is being restarted
                self._counted(_result(progress))
        return _result(answer)

    def _forget(self, window: EpochWindow, held: _Held) -> None:
        with self._changed:
            if self._held.get(window) is held:
                del self._held[window]
        _result(self._feed.forget.remote(self._spec_json, window, held.refs[0].hex()))


def _result(ref: Any) -> Any:
    """`ray.get`, raising what the task raised."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise cause_of(error) from error
