"""The feed: the one Ray actor that owns the windows of samples in Ray's object store. If it restarts, clients request
their windows again.

A window is a range of consecutive samples of an epoch, built by one task; slabs are its parts, the unit of transfer.
The feed knows no steps or ranks. A window that a reader needs now is built at once; windows needed later are built
while there are workers and memory. The least recently requested windows are dropped first. Ray keeps an object only
while its owner lives, so if the feed dies, its windows are built again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from pydantic import BaseModel, ConfigDict, PositiveInt

from data_service.samples.samples import Samples
from data_service.samples.spec import StreamSpec
from data_service.service.gauges import GAUGE_DESCRIPTIONS, StoreRetryGauge, make_gauge
from data_service.service.prefetch import EpochWindow
from data_service.service.tasks import (
    SlabRefs,
    is_object_store_full,
    object_store_bytes,
    object_store_full_error,
    run_pass_on_ray,
    submit_window,
)
from data_service.store.open import open_store
from data_service.stream.counts import RowCounter, RowCounts
from data_service.stream.plan import EpochLayout, StreamPlan
from data_service.stream.sources import Corpora
from data_service.stream.stages import make_plan
from data_service.stream.stream import SlabLayout, rows_per_slab
from data_service.stream.token_axis import TokenAxis

FeedHandle = Any  # an ActorHandle of a Feed; Ray's type lacks the actor's methods


class FeedConfig(BaseModel):
    """The resources that the data service may use. They do not change the samples.

    Attributes:
        workers: largest number of windows that are built at the same time.
        memory: limit in bytes for the windows of all streams; two windows are always allowed. At most half of the
            nodes' object stores is used, because readers hold copies of the samples that they read.
        slab_tokens: approximate number of tokens in a slab, the unit in which samples are sent.
        cache: URI of a folder that keeps row counts between runs; None to count at every start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: PositiveInt
    memory: PositiveInt
    slab_tokens: PositiveInt = 1 << 19
    cache: str | None = None


@dataclass(frozen=True)
class OpenStream:
    """The properties of an opened stream that a client needs. `windows_held`: number of windows that may be held at a
    time; `notes`: human-readable remarks."""

    epoch_layout: EpochLayout
    slab_rows: int
    windows_held: int
    notes: tuple[str, ...] = ()


class SlabRequest(NamedTuple):
    """A reader's request for references to slabs of a window.

    A request without slabs only says that the reader still uses the window.

    Attributes:
        window: the requested window.
        layout: layout for the build; if the window was already built with another layout, that one remains.
        slabs: numbers of the requested slabs in `layout`.
    """

    window: EpochWindow
    layout: SlabLayout
    slabs: tuple[int, ...]


class WindowBuild(NamedTuple):
    """A build of a window, finished or under way.

    Attributes:
        name: name of this build; another build of the same window has another name.
        layout: division of the window into slabs.
        refs: references to the requested slabs, by number; empty if the build has another layout than requested.
    """

    name: str
    layout: SlabLayout
    refs: "dict[int, ray.ObjectRef[Samples]]"


class _HeldBuild(NamedTuple):
    """A build of a window that the feed holds, finished or under way. `slabs`: references to all its slabs."""

    layout: SlabLayout
    slabs: SlabRefs

    @property
    def name(self) -> str:
        return str(self.slabs[0].hex())

    def to_window_build(self, wanted: SlabRequest) -> WindowBuild:
        """Return this build as the answer to the request `wanted`."""
        known = wanted.slabs if wanted.layout == self.layout else ()
        return WindowBuild(self.name, self.layout, {slab: self.slabs[slab] for slab in known})


@dataclass(frozen=True)
class _BuildFailures:
    """Consecutive failed builds of one window. `last`: name of the last failed build; `count`: number of failures;
    `most`: number of failures after which readers give up."""

    last: str
    count: int
    most: int


@dataclass(frozen=True)
class _Stream:
    """An opened stream: its corpora, the row counts of each source, its plan, and the properties for clients."""

    spec_json: str
    corpora: Corpora
    counts: tuple[RowCounts, ...]
    plan: StreamPlan
    opened: OpenStream


_WindowKey = tuple[str, int, int]  # JSON of the stream's spec, epoch, number of the window


class Feed:
    """The feed's actor. The JSON of its spec identifies a stream, so a restarted feed can open the stream again."""

    def __init__(self, config: FeedConfig) -> None:
        self._config = config
        self._counted = 0
        self._streams: dict[str, _Stream] = {}
        self._builds: OrderedDict[_WindowKey, _HeldBuild] = OrderedDict()
        self._failures: dict[_WindowKey, _BuildFailures] = {}
        self._axes: dict[str, ray.ObjectRef[TokenAxis]] = {}
        self._ready_gauge = make_gauge("windows_ready", GAUGE_DESCRIPTIONS["windows_ready"], {})
        self._retry_gauge = StoreRetryGauge()

    def open(self, spec_json: str) -> OpenStream:
        """Plan a stream, the first time after counting its rows; return the properties that a client needs.

        Raises:
            CorpusError: a corpus is missing or does not fit the spec.
            PlanError: no samples can be made from the corpora.
            StoreError: a store cannot be read.
        """
        return self._stream(spec_json).opened

    @ray.method(concurrency_group="progress")  # type: ignore[untyped-decorator]
    def progress(self) -> int:
        """Return the number of blocks counted so far. Ray runs this method even while another method counts."""
        return self._counted

    def windows(
        self, spec_json: str, needed: SlabRequest, ahead_requests: Sequence[SlabRequest]
    ) -> dict[EpochWindow, WindowBuild]:
        """Return a build of the window in `needed`, and of each window in `ahead_requests` for which there is room."""
        stream = self._stream(spec_json)
        requested = {_window_key(spec_json, wanted.window) for wanted in (needed, *ahead_requests)}
        for wanted in (needed, *ahead_requests):
            self._request_window(stream, wanted, requested, must=wanted is needed)
        self._ready_gauge.set(float(len(self._builds) - self._unfinished()))
        self._retry_gauge.update()
        return {
            wanted.window: self._builds[key].to_window_build(wanted)
            for wanted in (needed, *ahead_requests)
            if (key := _window_key(spec_json, wanted.window)) in self._builds
        }

    def token_axis(self, spec_json: str) -> "list[ray.ObjectRef[TokenAxis]]":
        """Return, in a list, the reference to the stream's token axis, which the ranks of a node share.

        The first time, the length of every row is measured. Raises the errors of `open`; BuildFailed: the object stores
        have no room for the axis.
        """
        if spec_json not in self._axes:
            stream = self._stream(spec_json)
            axis = TokenAxis(stream.plan, stream.counts, self._counter().measure_rows(stream.corpora))
            try:
                self._axes[spec_json] = ray.put(axis)
            except ray.exceptions.RayError as error:
                raise (
                    object_store_full_error("the lengths of a corpus's rows", error)
                    if is_object_store_full(error)
                    else error
                ) from error
        return [self._axes[spec_json]]

    def forget(self, spec_json: str, window: EpochWindow, build: str, most: int = 0) -> int:
        """Forget a build of a window that was lost or has failed. The next request for the window starts another build.
        Return the number of consecutive failed builds, this one included; 0 if none is counted.

        `most`: 0 if the build was lost, so that failures before it no longer count; if it failed, the number of
        consecutive failures after which readers give up. Counting then restarts.
        """
        key = _window_key(spec_json, window)
        failures = self._failures.get(key)
        if key in self._builds and self._builds[key].name == build:
            del self._builds[key]
            if most:
                before = failures.count % most if failures is not None and failures.most == most else 0
                failures = self._failures[key] = _BuildFailures(build, before + 1, most)
            else:
                self._failures.pop(key, None)
        return failures.count if failures is not None and failures.last == build else 0

    def _stream(self, spec_json: str) -> _Stream:
        if spec_json not in self._streams:
            self._streams[spec_json] = self._open(spec_json)
        return self._streams[spec_json]

    def _open(self, spec_json: str) -> _Stream:
        spec = StreamSpec.model_validate_json(spec_json)
        corpora = Corpora(spec)
        counter = self._counter()
        counts = counter.count_rows(corpora)
        plan = make_plan(corpora, counts, counter)
        held = max(2, (memory := self._memory()) // max(1, plan.epoch_layout.window_bytes))
        rows = rows_per_slab(spec.row_length, self._config.slab_tokens)
        notes = plan.notes
        if memory < self._config.memory:
            requested = f"data_service.memory asks for {self._config.memory >> 20} MiB"
            notes += (f"{requested}, but only half of Ray's object stores can be used: {memory >> 20} MiB",)
        return _Stream(spec_json, corpora, counts, plan, OpenStream(plan.epoch_layout, rows, held, notes))

    def _memory(self) -> int:
        """Return how many bytes of windows may be held. The number changes when nodes join or leave the cluster."""
        return min(self._config.memory, object_store_bytes() // 2)

    def _add_counted_blocks(self, blocks: int) -> None:
        self._counted += blocks

    def _counter(self) -> RowCounter:
        cache = None if self._config.cache is None else open_store(self._config.cache)
        return RowCounter(cache, run_pass_on_ray, self._add_counted_blocks)

    def _request_window(self, stream: _Stream, wanted: SlabRequest, requested: set[_WindowKey], *, must: bool) -> None:
        """Mark a window as requested now. Start its build if there is room; with `must` even without room."""
        key = _window_key(stream.spec_json, wanted.window)
        if key not in self._builds:
            if not self._make_room(stream, requested) and not must:
                return
            window = stream.plan.window(*wanted.window)
            slabs = submit_window(stream.spec_json, window, wanted.layout)
            self._builds[key] = _HeldBuild(wanted.layout, slabs)
        self._builds.move_to_end(key)

    def _make_room(self, stream: _Stream, requested: set[_WindowKey]) -> bool:
        """Drop the least recently requested windows until one more fits. Return whether another build may start."""
        size, memory = stream.plan.epoch_layout.window_bytes, self._memory()
        for key in [key for key in self._builds if key not in requested]:
            if self._has_room_for(size, memory):
                break
            del self._builds[key]
        return self._has_room_for(size, memory) and self._unfinished() < self._config.workers

    def _has_room_for(self, size: int, memory: int) -> bool:
        """Return whether a window of `size` bytes fits in `memory`. Two windows always do."""
        held = sum(self._streams[spec_json].plan.epoch_layout.window_bytes for spec_json, _, _ in self._builds)
        return held + size <= memory or len(self._builds) < 2

    def _unfinished(self) -> int:
        """Return the number of builds under way."""
        first = [held.slabs[0] for held in self._builds.values()]
        if not first:
            return 0
        _, unfinished = ray.wait(first, num_returns=len(first), timeout=0, fetch_local=False)
        return len(unfinished)


def start_feed(config: FeedConfig) -> FeedHandle:
    """Start the feed on the running Ray cluster; return its handle.

    The actor exists as long as the handle. If it dies, Ray restarts it.
    """
    lasting = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    actor = ray.remote(**lasting, concurrency_groups={"progress": 1})(Feed)
    return actor.remote(config)


def _window_key(spec_json: str, window: EpochWindow) -> _WindowKey:
    return (spec_json, *window)
