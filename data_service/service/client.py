"""`FeedClient`: a rank's reader of a stream that the feed delivers. It asks again for what is lost."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import ray

from data_service.errors import UserError
from data_service.samples.samples import Samples, join_rows, slice_rows
from data_service.samples.spec import StreamSpec
from data_service.service import tasks
from data_service.service.announced import AnnouncedWindows, EpochWindow
from data_service.service.feed import Build, FeedHandle, OpenStream, SlabRequest
from data_service.store.errors import StoreUnavailable
from data_service.stream.stream import SlabLayout, StepLayout
from data_service.stream.token_axis import TokenAxis

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 2.0
_STORE_ATTEMPTS = 3  # builds of a window, each of which has already retried its requests with patience


@dataclass
class _Held:
    """What a client keeps of a window: references to slabs of one build of it, and the slabs it has fetched."""

    name: str
    layout: SlabLayout
    refs: "dict[int, ray.ObjectRef[Samples]]"
    slabs: dict[int, Samples] = field(default_factory=dict)


class _Gone(Exception):
    """A build that failed or was lost. The window will be built again."""


class FeedClient:
    """Reads one stream. The bytes are those of `Stream.read`, whatever dies on the way.

    One thread reads; another, the client's own, fetches what `prefetch` announced.

    When a stream is opened for the first time, the feed may count a whole corpus, for hours. Meanwhile `counted` is
    called every few seconds, in the waiting thread, with the number of blocks counted so far.

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
        self._steps: StepLayout | None = None
        self._announced = self._announce(())
        self._reading: set[EpochWindow] = set()
        self._failures: dict[EpochWindow, Exception] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._fetch_announced, name="feed-client", daemon=True)
        self._thread.start()

    @property
    def samples_per_epoch(self) -> int:
        """The same in every epoch."""
        return self._opened.epoch_layout.samples_per_epoch

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the stream's plan, for people to read."""
        return self._opened.notes

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes of each slab that is here, by the name of its object: ranks of a node share those of one name."""
        with self._changed:
            held = [
                (held.refs[slab], samples)
                for held in self._held.values()
                for slab, samples in list(held.slabs.items())  # fetched meanwhile
            ]
        return {ref.hex(): samples.nbytes for ref, samples in held}

    def token_axis(self) -> TokenAxis:
        """The stream measured in tokens, for batches of so many: one read-only object for all ranks of a node.

        The first time, rows' lengths are counted.
        """
        while True:
            (axis,) = self._await(self._feed.token_axis.remote(self._spec_json))
            try:
                found: TokenAxis = _result(axis)
            except ray.exceptions.ObjectLostError:  # with the feed: its successor makes another
                continue
            return found

    def read(self, epoch: int, start: int, stop: int) -> Samples:
        """Samples `start` to `stop` (at least one) of an epoch. The arrays are read-only.

        Raises:
            IndexError: outside the epoch.
            CorruptBlock, StoreError: a block that cannot be read, even after retries.
            BuildFailed: the processes that build a window die again and again, most likely for lack of memory; or
                there is no room for what they build.
        """
        if start >= stop:
            raise IndexError(f"no samples from {start} to {stop}")
        began = time.perf_counter()
        spans = [
            ((epoch, window), first, last)
            for window, first, last in self._opened.epoch_layout.spans(start, stop)
        ]
        with self._changed:
            self._reading = {window for window, _, _ in spans}
            self._move_on()
        parts = [part for window, first, last in spans for part in self._parts(window, first, last)]
        self.wait_seconds += time.perf_counter() - began
        return join_rows(parts)

    def prefetch(self, ranges: Iterable[tuple[int, int, int]], steps: StepLayout | None = None) -> None:
        """Announce what will be read here, as (epoch, start, stop) in order, the current range included.

        Ranges are taken from the iterator only as far as memory allows, so it may go on to the end of the run. What was
        announced before, and is not announced again, is dropped.

        Args:
            ranges: what this reader reads.
            steps: what all readers read together, if they share steps: windows are laid so that each finds its part
                of all steps in few slabs.
        """
        with self._changed:
            self._steps = steps
            self._announced = self._announce(ranges)
            self._move_on()

    def close(self) -> None:
        """Stop fetching, and drop everything."""
        with self._changed:
            self._closed = True
            self._announced, self._reading = self._announce(()), set()
            self._move_on()
        self._thread.join()

    def _announce(self, ranges: Iterable[tuple[int, int, int]]) -> AnnouncedWindows:
        spans = (
            ((epoch, window), first, last)
            for epoch, start, stop in ranges
            for window, first, last in self._opened.epoch_layout.spans(start, stop)
        )
        return AnnouncedWindows(spans, self._opened.windows_held, self._layout)

    def _layout(self, window: EpochWindow) -> SlabLayout:
        """The layout of a window's build, or the one that it would be given."""
        if window in self._held:
            return self._held[window].layout
        return SlabLayout.of(
            self._opened.epoch_layout, *window, rows=self._opened.slab_rows, steps=self._steps
        )

    def _parts(self, window: EpochWindow, first: int, last: int) -> list[Samples]:
        """Samples `first` to `last` of a window, in order."""
        while True:
            held = self._window(window, lambda layout: layout.slabs_of(first, last))
            try:
                return [
                    slice_rows(self._slab(window, held, slab), start, stop)
                    for slab, start, stop in held.layout.pieces(first, last)
                ]
            except _Gone:
                continue

    def _move_on(self) -> None:
        """Drop announced windows that have been read, take up more as far as memory allows, and drop all others."""
        self._announced.move_on(self._reading)
        kept = self._reading | self._announced.windows.keys()
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
                coming = self._next_announced()
            if coming is None:
                return
            try:
                self._fetch(*coming)
            except _Gone:
                continue
            except (UserError, ray.exceptions.RayError) as error:
                with self._changed:
                    self._failures[coming[0]] = error  # raised by the read that needs it

    def _fetch(self, window: EpochWindow, layout: SlabLayout, slab: int) -> None:
        held = self._window(window, lambda found: [slab] if found == layout else [])
        if held.layout == layout:
            self._slab(window, held, slab)

    def _next_announced(self) -> tuple[EpochWindow, SlabLayout, int] | None:
        for window, part in self._announced.windows.items():
            held = self._held.get(window)
            missing = (slab for slab in part.slabs if held is None or slab not in held.slabs)
            if window not in self._failures and (slab := next(missing, None)) is not None:
                return window, part.layout, slab
        return None

    def _slab(self, window: EpochWindow, held: _Held, slab: int) -> Samples:
        """One slab, kept here or from the object store. Raises _Gone if another build has to be asked for."""
        if slab in held.slabs:
            return held.slabs[slab]
        try:
            samples = self._get(window, held, slab)
        except StoreUnavailable as error:
            if self._forget(window, held, _STORE_ATTEMPTS) == _STORE_ATTEMPTS:
                raise
            raise _Gone from error
        except UserError:
            self._forget(window, held, 1)  # the build failed, the next need not
            raise
        except ray.exceptions.RayError as error:
            if tasks.died(error) or tasks.full(error):
                self._report(window, held, error)
            elif tasks.lost(error):
                self._forget(window, held)
            else:
                self._forget(window, held, 1)
                raise
            raise _Gone from error
        held.slabs[slab] = samples
        return samples

    def _get(self, window: EpochWindow, held: _Held, slab: int) -> Samples:
        """The slab, as soon as either thread has it. Raises _Gone if nobody wants it any more.

        If two threads ask Ray for the same
        object, one of them is sometimes left waiting.
        """
        ref = held.refs[slab]
        while not ray.wait([ref], timeout=_LOOK_SECONDS)[0]:
            if slab in held.slabs:
                return held.slabs[slab]
            with self._changed:
                if self._closed or self._held.get(window) is not held:
                    raise _Gone
        samples: Samples = _result(ref)
        return samples

    def _report(self, window: EpochWindow, held: _Held, error: Exception) -> None:
        """Tell the feed that a build died, or found no room, and wait a while for room. Raises BuildFailed if too many
        in a row did.
        """
        most = tasks.NO_ROOMS if (full := tasks.full(error)) else tasks.DEATHS
        failed, (epoch, number) = self._forget(window, held, most), window
        name = f"window {number} of epoch {epoch} of the {self.spec.split} samples"
        if failed == most:
            raise tasks.build_failed(name, self._opened.epoch_layout.window_bytes, error) from error
        if failed:
            why = "there was no room for it" if full else "its build died"
            reason = tasks.reason_of(error)
            _log.warning("%s: %s (%s), %d of %d in a row; building again", name, why, reason, failed, most)
        if full:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=2.0 ** (failed - 1))

    def _window(self, window: EpochWindow, needed: Callable[[SlabLayout], Iterable[int]]) -> _Held:
        """A build of a window, with references to the slabs of its layout that are needed; from here or the feed."""
        while True:
            with self._changed:
                failure = self._failures.pop(window, None)
                if failure is not None:
                    raise failure
                held = self._held.get(window)
                if held is not None and all(slab in held.refs for slab in needed(held.layout)):
                    return held
                wanted = self._wanted(window, needed)
                ahead = [self._wanted(other) for other in self._announced.windows if other != window]
            answer: dict[EpochWindow, Build] = _result(
                self._feed.windows.remote(self._spec_json, wanted, ahead)
            )
            with self._changed:
                for found in answer.keys() & {window, *self._announced.windows}:
                    self._take(found, answer[found])

    def _wanted(
        self, window: EpochWindow, needed: Callable[[SlabLayout], Iterable[int]] = lambda layout: ()
    ) -> SlabRequest:
        """The slabs that are needed or announced and to which there is no reference yet."""
        layout, slabs = self._layout(window), dict[int, None]()
        slabs.update(dict.fromkeys(needed(layout)))
        if window in self._announced.windows:
            part = self._announced.windows[window]
            part.lay(layout)
            slabs.update(part.slabs)
        known = self._held[window].refs if window in self._held else {}
        return SlabRequest(window, layout, tuple(slab for slab in slabs if slab not in known))

    def _take(self, window: EpochWindow, build: Build) -> None:
        held = self._held.get(window)
        if held is not None and held.name == build.name:
            held.refs.update(build.refs)
            return
        self._held[window] = _Held(build.name, build.layout, dict(build.refs))
        if window in self._announced.windows:
            self._announced.windows[window].lay(build.layout)

    def _await(self, answer: Any) -> Any:
        """An answer that may take a counting pass. Raises what the feed raised."""
        while self._counted is not None and not ray.wait([answer], timeout=_LOOK_SECONDS)[0]:
            progress = self._feed.progress.remote()
            if ray.wait([progress], timeout=_LOOK_SECONDS)[0]:  # not while the feed is being restarted
                self._counted(_result(progress))
        return _result(answer)

    def _forget(self, window: EpochWindow, held: _Held, most: int = 0) -> int:
        """Tell the feed that another build is needed. `most` and the answer are those of `Feed.forget`."""
        with self._changed:
            if self._held.get(window) is held:
                del self._held[window]
        failed: int = _result(self._feed.forget.remote(self._spec_json, window, held.name, most))
        return failed


def _result(ref: Any) -> Any:
    """`ray.get`, raising what the task raised."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise tasks.cause_of(error) from error
