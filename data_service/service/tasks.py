"""The Ray tasks that count rows and build windows. They are stateless, so what is lost is computed again."""

from collections import Counter
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import ray

from data_service.errors import BuildFailed, UserError
from data_service.samples.samples import Samples
from data_service.samples.spec import StreamSpec
from data_service.stream.counts import Counted, Found, Pass
from data_service.stream.plan import Window
from data_service.stream.sources import Corpora
from data_service.stream.stream import SlabLayout, build_window

SlabRefs: TypeAlias = "list[ray.ObjectRef[Samples]]"

DEATHS = 8  # processes in a row that die of one task: more often than machines do by chance
NO_ROOMS = 8  # builds in a row that found the object store full, with pauses between them: two minutes
SEE_RAY = "Ray's logs/raylet.out of the node says what killed them"
_COUNTED_TOGETHER = 64  # blocks in a counting task: a few seconds of work


def submit_window(spec_json: str, window: Window, layout: SlabLayout, cpus: float) -> SlabRefs:
    """Start building a window; returns references to its slabs. If the build fails or is lost, the caller submits
    another.
    """
    # Ray itself would repeat without end what dies for want of memory. Here the feed counts.
    options = {
        "num_returns": layout.slabs,
        "num_cpus": cpus,
        "max_retries": 0,
        "scheduling_strategy": "SPREAD",
    }
    refs = _BUILD.options(**options).remote(spec_json, window, layout)
    return refs if layout.slabs > 1 else [refs]


def run_pass(
    job: Pass, corpora: Corpora, source: int, blocks: range, counted: Counted, *, cpus: float
) -> Found:
    """Run a pass over blocks of a source (a `Runner`), in as many tasks at once as there is room for.

    Raises:
        CorruptBlock, StoreError: a block that cannot be read.
        BuildFailed: the processes that go through some blocks die again and again.
    """
    task = _PASS.options(num_cpus=cpus, max_retries=0, scheduling_strategy="SPREAD")
    spec_json = corpora.spec.model_dump_json()

    def start(part: range) -> "ray.ObjectRef[Found]":
        return task.remote(job, spec_json, source, part.start, part.stop)

    parts = [blocks[first : first + _COUNTED_TOGETHER] for first in range(0, len(blocks), _COUNTED_TOGETHER)]
    coming = {start(part): part for part in parts}
    found, deaths = dict[int, Found](), Counter[int]()
    while coming:
        (done, *_), _ = ray.wait(list(coming))
        part = coming.pop(done)
        try:
            found[part.start] = ray.get(done)
        except ray.exceptions.RayError as error:
            deaths[part.start] += died(error)
            if deaths[part.start] == DEATHS:
                raise _uncounted(corpora, source, part, error) from error
            if not (died(error) or lost(error)):
                raise cause_of(error) from error
            coming[start(part)] = part
        else:
            counted(len(part))
    return np.concatenate([job(corpora, source, 0, 0), *(found[part.start] for part in parts)])


def _uncounted(corpora: Corpora, source: int, part: range, error: Exception) -> BuildFailed:
    uri, reason = corpora.spec.sources[source].uri, reason_of(error)
    return BuildFailed(
        f"{uri}, blocks {part.start} to {part.stop - 1}: {DEATHS} processes in a row died while they counted rows; "
        f"the last: {reason}",
        remedy=f"lower data_service.workers, or give the nodes more memory; {SEE_RAY}",
    )


def cause_of(error: Exception) -> BaseException:
    """The error that a task, or a task that it waited for, raised, without Ray's wrapping."""
    cause: BaseException = error
    while isinstance(cause, ray.exceptions.RayTaskError) and cause.cause is not None:
        cause = cause.cause
    return cause if isinstance(cause, UserError) else error


def died(error: Exception) -> bool:
    """Whether a task ended because its process died or ran out of memory."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return isinstance(error.cause, MemoryError)
    return isinstance(error, ray.exceptions.WorkerCrashedError | ray.exceptions.OutOfMemoryError)


def full(error: Exception) -> bool:
    """Whether an object store had no room for a result, and none could be made by spilling to a disk."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    return isinstance(cause, ray.exceptions.ObjectStoreFullError | ray.exceptions.OutOfDiskError)


def build_failed(what: str, window_bytes: int, error: Exception) -> BuildFailed:
    """A window of so many bytes was built again and again: its processes died, or object stores stayed full."""
    if full(error):
        return no_room(what, error)
    return BuildFailed(
        f"{what} could not be built: {DEATHS} processes in a row died of it; the last: {reason_of(error)}",
        remedy=f"a build takes about {(2 * window_bytes >> 20) + 1} MiB: lower data_service.workers, or give the nodes "
        f"more memory; {SEE_RAY}",
    )


def no_room(what: str, error: Exception) -> BuildFailed:
    """An object store stayed full."""
    return BuildFailed(
        f"{what} found no room in Ray's object stores, which hold {object_store_bytes() >> 20} MiB: {reason_of(error)}",
        remedy="lower data_service.memory, give the nodes more shared memory (launch: --shared-memory), or make room "
        "on the disk where Ray spills (RAY_object_spilling_directory, by default in the temporary folder)",
    )


def object_store_bytes() -> int:
    """Of all nodes together."""
    return int(ray.cluster_resources().get("object_store_memory", 0))


def lost(error: Exception) -> bool:
    """Whether a task's node or its result is gone, which is no fault of the task."""
    return isinstance(error, ray.exceptions.ObjectLostError | ray.exceptions.NodeDiedError)


def reason_of(error: Exception) -> str:
    """Why a task died, in one line."""
    cause = (
        error.cause if isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None else error
    )
    return str(cause).strip().partition("\n")[0] or type(cause).__name__


def _build_slabs(spec_json: str, window: Window, layout: SlabLayout) -> list[Samples] | Samples:
    slabs = build_window(_corpora(spec_json), window, layout)
    return slabs if len(slabs) > 1 else slabs[0]


def _count_rows(job: Pass, spec_json: str, source: int, start: int, stop: int) -> Found:
    return job(_corpora(spec_json), source, start, stop)


_BUILD = ray.remote(_build_slabs)
_PASS = ray.remote(_count_rows)


@lru_cache(maxsize=8)
def _corpora(spec_json: str) -> Corpora:
    """Manifests and stores are opened once per worker process."""
    return Corpora(StreamSpec.model_validate_json(spec_json))
