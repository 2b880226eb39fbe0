"""`FeedClient`: the reader by which a training process (rank) gets a stream's samples from the feed (`feed.py`, which
explains windows and slabs). Lost samples are requested again."""

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
from data_service.service.feed import FeedHandle, OpenStream, SlabRequest, WindowBuild
from data_service.service.prefetch import AnnouncedWindows, EpochWindow
from data_service.store.errors import StoreUnavailable
from data_service.stream.stream import SlabLayout, StepStart
from data_service.stream.token_axis import TokenAxis

_log = logging.getLogger(__name__)
_POLL_INTERVAL_S = 2.0  # seconds between checks whether another thread or the feed has made progress
_MAX_FAILED_BUILDS = 3  # builds of a window that the corpus's store may fail before the read fails


@dataclass
class _HeldWindow:
    """What a client holds of one build of a window: references to slabs, and the slabs fetched so far."""

    name: str
    layout: SlabLayout
    refs: "dict[int, ray.ObjectRef[Samples]]"
    slabs: dict[int, Samples] = field(default_factory=dict)


class _BuildLost(Exception):
    """The build of a window failed or was lost. The window will be built again."""


class FeedClient:
    """A reader of one stream. It returns the same bytes as `Stream.read`, even if the feed or workers die meanwhile.

    The caller reads in one thread. A thread of the client fetches the ranges that were announced by `prefetch`.

    `counted`: function that gets the number of blocks counted so far, every few seconds while the stream is opened.
    Opening a corpus for the first time may take hours, because the feed counts all its rows.

    Raises:
        CorpusError, PlanError, StoreError: the stream cannot be opened.
    """

    def __init__(self, feed: FeedHandle, spec: StreamSpec, counted: Callable[[int], None] | None = None) -> None:
        self.spec = spec
        self.wait_seconds = 0.0
        """Seconds that `read` has waited for samples so far."""
        self._feed = feed
        self._counted = counted
        self._spec_json = spec.model_dump_json()
        self._opened: OpenStream = self._wait_for_answer(feed.open.remote(self._spec_json))
        self._changed = threading.Condition()  # guards all following attributes
        self._held: dict[EpochWindow, _HeldWindow] = {}
        self._steps: StepStart | None = None
        self._announced = self._make_announced_windows(())
        self._reading: set[EpochWindow] = set()
        self._failures: dict[EpochWindow, Exception] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run_prefetch_thread, name="feed-client", daemon=True)
        self._thread.start()

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in an epoch, the same in every epoch."""
        return self._opened.epoch_layout.samples_per_epoch

    @property
    def notes(self) -> tuple[str, ...]:
        """Human-readable remarks on the stream's plan."""
        return self._opened.notes

    @property
    def held_bytes(self) -> dict[str, int]:
        """Bytes of each held slab, by the id of its Ray object, which the ranks of a node share."""
        with self._changed:
            held = [
                (held.refs[slab], samples)
                for held in self._held.values()
                for slab, samples in list(held.slabs.items())  # a copy: the fetching thread may add slabs
            ]
        return {ref.hex(): samples.nbytes for ref, samples in held}

    def token_axis(self) -> TokenAxis:
        """Return the stream's token axis, for batches of a given number of tokens. All ranks of a node share one copy.

        The first time, the feed measures the length of every row.
        """
        while True:
            (axis,) = self._wait_for_answer(self._feed.token_axis.remote(self._spec_json))
            try:
                found: TokenAxis = _get_result(axis)
            except ray.exceptions.ObjectLostError:
                # The feed died, and the axis with it. The restarted feed computes the axis again.
                continue
            return found

    def read(self, epoch: int, start: int, stop: int) -> Samples:
        """Return the samples [start, stop) of an epoch, at least one. The arrays are read-only.

        Raises:
            IndexError: the range is empty or outside the epoch.
            CorruptBlock, StoreError: a block cannot be read, even after retries.
            BuildFailed: the processes that build a window died repeatedly, most likely because of lack of memory; or
                the object stores had no room for the window.
        """
        if start >= stop:
            raise IndexError(f"the range of samples from {start} to {stop} is empty")
        began = time.perf_counter()
        spans = [
            ((epoch, window), first, last)
            for window, first, last in self._opened.epoch_layout.split_by_window(start, stop)
        ]
        with self._changed:
            self._reading = {window for window, _, _ in spans}
            self._advance_windows()
        parts = [part for window, first, last in spans for part in self._sample_parts(window, first, last)]
        self.wait_seconds += time.perf_counter() - began
        return join_rows(parts)

    def prefetch(self, ranges: Iterable[tuple[int, int, int]], steps: StepStart | None = None) -> None:
        """Announce the ranges that will be read, in order, to fetch them ahead. Replaces earlier announcements.

        The iterator is consumed only as far as memory allows, so it may yield all ranges of a training run.

        Args:
            ranges: ranges (epoch, start, stop) that this reader will read, the current one included.
            steps: size and position of the training steps, if all readers read the same steps together. Windows are
                then cut into slabs so that each reader finds its samples of every step in few slabs.
        """
        with self._changed:
            self._steps = steps
            self._announced = self._make_announced_windows(ranges)
            self._advance_windows()

    def close(self) -> None:
        """Stop fetching and drop all samples and references."""
        with self._changed:
            self._closed = True
            self._announced, self._reading = self._make_announced_windows(()), set()
            self._advance_windows()
        self._thread.join()

    def _make_announced_windows(self, ranges: Iterable[tuple[int, int, int]]) -> AnnouncedWindows:
        spans = (
            ((epoch, window), first, last)
            for epoch, start, stop in ranges
            for window, first, last in self._opened.epoch_layout.split_by_window(start, stop)
        )
        return AnnouncedWindows(spans, self._opened.windows_held, self._slab_layout)

    def _slab_layout(self, window: EpochWindow) -> SlabLayout:
        """Return the slab layout of a window's build; without a build, the layout that this client would request."""
        if window in self._held:
            return self._held[window].layout
        return SlabLayout.for_window(self._opened.epoch_layout, *window, rows=self._opened.slab_rows, steps=self._steps)

    def _sample_parts(self, window: EpochWindow, first: int, last: int) -> list[Samples]:
        """Return samples `first` to `last` (exclusive) of a window, in order, one part per slab."""
        while True:
            held = self._get_window(window, lambda layout: layout.slabs_with_samples(first, last))
            try:
                return [
                    slice_rows(self._get_slab(window, held, slab), start, stop)
                    for slab, start, stop in held.layout.iter_slab_ranges(first, last)
                ]
            except _BuildLost:
                continue

    def _advance_windows(self) -> None:
        """Drop windows that were read or are no longer announced. Let the prefetch thread start the next windows."""
        self._announced.advance_past(self._reading)
        kept = self._reading | self._announced.windows.keys()
        for window in self._held.keys() - kept:
            del self._held[window]
        for window in self._failures.keys() - kept:
            del self._failures[window]
        self._changed.notify()

    def _run_prefetch_thread(self) -> None:
        """Fetch missing slabs of announced windows, in order, until `close`. The body of the client's thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next_missing_slab() is not None)
                coming = self._next_missing_slab()
            if coming is None:
                return
            try:
                self._fetch_announced_slab(*coming)
            except _BuildLost:
                continue
            except (UserError, ray.exceptions.RayError) as error:
                with self._changed:
                    self._failures[coming[0]] = error  # the read of this window raises it

    def _fetch_announced_slab(self, window: EpochWindow, layout: SlabLayout, slab: int) -> None:
        """Fetch one slab of an announced window, unless the window was built with another layout."""
        held = self._get_window(window, lambda found: [slab] if found == layout else [])
        if held.layout == layout:
            self._get_slab(window, held, slab)

    def _next_missing_slab(self) -> tuple[EpochWindow, SlabLayout, int] | None:
        """Return window, layout and number of the next announced slab to fetch; None if there is none."""
        for window, part in self._announced.windows.items():
            held = self._held.get(window)
            missing = (slab for slab in part.slabs if held is None or slab not in held.slabs)
            if window not in self._failures and (slab := next(missing, None)) is not None:
                return window, part.layout, slab
        return None

    def _get_slab(self, window: EpochWindow, held: _HeldWindow, slab: int) -> Samples:
        """Return one slab; fetch it if it is not held. Raises _BuildLost: another build is needed."""
        if slab in held.slabs:
            return held.slabs[slab]
        try:
            samples = self._fetch_slab(window, held, slab)
        except StoreUnavailable as error:
            if self._discard_build(window, held, _MAX_FAILED_BUILDS) == _MAX_FAILED_BUILDS:
                raise
            raise _BuildLost from error
        except UserError:
            self._discard_build(window, held, 1)  # so that a later read tries another build
            raise
        except ray.exceptions.RayError as error:
            if tasks.is_worker_death(error) or tasks.is_object_store_full(error):
                self._report_failed_build(window, held, error)
            elif tasks.is_lost_result(error):
                self._discard_build(window, held)
            else:
                self._discard_build(window, held, 1)
                raise
            raise _BuildLost from error
        held.slabs[slab] = samples
        return samples

    def _fetch_slab(self, window: EpochWindow, held: _HeldWindow, slab: int) -> Samples:
        """Return the slab as soon as this or the other thread has it. Raises _BuildLost: the build was dropped.

        This method polls: if two threads wait for the same Ray object, one of them sometimes waits forever.
        """
        ref = held.refs[slab]
        while not ray.wait([ref], timeout=_POLL_INTERVAL_S)[0]:
            if slab in held.slabs:
                return held.slabs[slab]
            with self._changed:
                if self._closed or self._held.get(window) is not held:
                    raise _BuildLost
        samples: Samples = _get_result(ref)
        return samples

    def _report_failed_build(self, window: EpochWindow, held: _HeldWindow, error: Exception) -> None:
        """Tell the feed that a build's process died or the object store was full. If it was full, wait a while.

        Raises BuildFailed: too many builds in a row have failed.
        """
        most = tasks.MAX_FULL_STORE_BUILDS if (full := tasks.is_object_store_full(error)) else tasks.MAX_DEATHS
        failed, (epoch, number) = self._discard_build(window, held, most), window
        name = f"window {number} of epoch {epoch} of the {self.spec.split} samples"
        if failed == most:
            raise tasks.build_failed_error(name, self._opened.epoch_layout.window_bytes, error) from error
        if failed:
            why = "the object store was full" if full else "the build's process died"
            reason = tasks.death_reason(error)
            _log.warning("%s: %s (%s), %d of %d in a row; building again", name, why, reason, failed, most)
        if full:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=2.0 ** (failed - 1))

    def _get_window(self, window: EpochWindow, needed: Callable[[SlabLayout], Iterable[int]]) -> _HeldWindow:
        """Return the held build of a window with references to all needed slabs. Ask the feed for missing references.

        `needed`: function that returns the numbers of the needed slabs for a layout.
        """
        while True:
            with self._changed:
                failure = self._failures.pop(window, None)
                if failure is not None:
                    raise failure
                held = self._held.get(window)
                if held is not None and all(slab in held.refs for slab in needed(held.layout)):
                    return held
                wanted = self._missing_slabs_request(window, needed)
                ahead = [self._missing_slabs_request(other) for other in self._announced.windows if other != window]
            answer: dict[EpochWindow, WindowBuild] = _get_result(
                self._feed.windows.remote(self._spec_json, wanted, ahead)
            )
            with self._changed:
                for found in answer.keys() & {window, *self._announced.windows}:
                    self._add_build(found, answer[found])

    def _missing_slabs_request(
        self, window: EpochWindow, needed: Callable[[SlabLayout], Iterable[int]] = lambda layout: ()
    ) -> SlabRequest:
        """Return the request for needed and announced slabs of a window to which this client has no reference yet."""
        layout, slabs = self._slab_layout(window), dict[int, None]()
        slabs.update(dict.fromkeys(needed(layout)))
        if window in self._announced.windows:
            part = self._announced.windows[window]
            part.replace_layout(layout)
            slabs.update(part.slabs)
        known = self._held[window].refs if window in self._held else {}
        return SlabRequest(window, layout, tuple(slab for slab in slabs if slab not in known))

    def _add_build(self, window: EpochWindow, build: WindowBuild) -> None:
        """Hold a build that the feed has returned, or add its references to the same build held already."""
        held = self._held.get(window)
        if held is not None and held.name == build.name:
            held.refs.update(build.refs)
            return
        self._held[window] = _HeldWindow(build.name, build.layout, dict(build.refs))
        if window in self._announced.windows:
            self._announced.windows[window].replace_layout(build.layout)

    def _wait_for_answer(self, answer: Any) -> Any:
        """Return the feed's answer; meanwhile report the progress of counting rows. Raises the feed's error."""
        while self._counted is not None and not ray.wait([answer], timeout=_POLL_INTERVAL_S)[0]:
            progress = self._feed.progress.remote()
            # A feed that is being restarted does not answer.
            if ray.wait([progress], timeout=_POLL_INTERVAL_S)[0]:
                self._counted(_get_result(progress))
        return _get_result(answer)

    def _discard_build(self, window: EpochWindow, held: _HeldWindow, most: int = 0) -> int:
        """Drop a build here and in the feed. `most` and the returned number of failures are as for `Feed.forget`."""
        with self._changed:
            if self._held.get(window) is held:
                del self._held[window]
        failed: int = _get_result(self._feed.forget.remote(self._spec_json, window, held.name, most))
        return failed


def _get_result(ref: Any) -> Any:
    """Return the value of a Ray reference. Raises a task's UserError without Ray's wrapping."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise tasks.unwrap_task_error(error) from error
