"""The Ray tasks that count rows and build windows. Tasks are stateless, so lost results are computed again."""

from collections import Counter
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import ray

from data_service.errors import BuildFailed, UserError
from data_service.samples.samples import Samples
from data_service.samples.spec import StreamSpec
from data_service.stream.counts import CountingPass, PassResult, ReportCountedBlocks
from data_service.stream.plan import Window
from data_service.stream.sources import Corpora
from data_service.stream.stream import SlabLayout, build_window

SlabRefs: TypeAlias = "list[ray.ObjectRef[Samples]]"  # references to all slabs of a window, by slab number

MAX_DEATHS = 8  # consecutive deaths of a task's process after which the task is given up
MAX_FULL_STORE_BUILDS = 8  # consecutive builds that may find the object store full: about two minutes
RAY_LOG_HINT = (
    "Ray's file logs/gcs_server.out on the head node says on which machines they died, and logs/raylet.out there why"
)
_TASK_CPUS = 0.25  # CPU cores that a task reserves in Ray's scheduler
_BLOCKS_PER_TASK = 64  # blocks in one counting task: a few seconds of work


def submit_window(spec_json: str, window: Window, layout: SlabLayout) -> SlabRefs:
    """Start the build of a window; return references to its slabs. If it fails, the caller must submit another."""
    # Ray's own retries are off: Ray would retry tasks that run out of memory endlessly. The feed counts failures.
    refs = _BUILD_TASK.options(num_returns=layout.slab_count).remote(spec_json, window, layout)
    return refs if layout.slab_count > 1 else [refs]


def run_pass_on_ray(
    job: CountingPass,
    corpora: Corpora,
    source: int,
    blocks: range,
    report_counted: ReportCountedBlocks,
) -> PassResult:
    """Run a counting pass over blocks of a source in Ray tasks. This function is a `PassRunner`.

    Raises:
        CorruptBlock, StoreError: a block cannot be read.
        BuildFailed: `MAX_DEATHS` processes in a row that counted the same blocks died.
    """
    spec_json = corpora.spec.model_dump_json()

    def submit_part(part: range) -> "ray.ObjectRef[PassResult]":
        return _PASS_TASK.remote(job, spec_json, source, part.start, part.stop)

    parts = [blocks[first : first + _BLOCKS_PER_TASK] for first in range(0, len(blocks), _BLOCKS_PER_TASK)]
    coming = {submit_part(part): part for part in parts}
    found, deaths = dict[int, PassResult](), Counter[int]()
    while coming:
        (done, *_), _ = ray.wait(list(coming))
        part = coming.pop(done)
        try:
            found[part.start] = ray.get(done)
        except ray.exceptions.RayError as error:
            deaths[part.start] = deaths[part.start] + 1 if is_worker_death(error) else 0
            if deaths[part.start] == MAX_DEATHS:
                raise _counting_error(corpora, source, part, error) from error
            if not (is_worker_death(error) or is_lost_result(error)):
                raise unwrap_task_error(error) from error
            coming[submit_part(part)] = part
        else:
            report_counted(len(part))
    return np.concatenate([job(corpora, source, 0, 0), *(found[part.start] for part in parts)])


def _counting_error(corpora: Corpora, source: int, part: range, error: Exception) -> BuildFailed:
    uri, reason = corpora.spec.sources[source].uri, death_reason(error)
    return BuildFailed(
        f"{uri}, blocks {part.start} to {part.stop - 1}: {MAX_DEATHS} processes in a row died while they counted rows; "
        f"the last: {reason}",
        remedy=f"lower data_service.workers, or give the nodes more memory; {RAY_LOG_HINT}",
    )


def unwrap_task_error(error: Exception) -> BaseException:
    """Return the UserError inside Ray's (possibly nested) task errors; `error` itself if there is none."""
    cause: BaseException = error
    while isinstance(cause, ray.exceptions.RayTaskError) and cause.cause is not None:
        cause = cause.cause
    return cause if isinstance(cause, UserError) else error


def is_worker_death(error: Exception) -> bool:
    """Return whether a task ended because its process died or ran out of memory."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return isinstance(error.cause, MemoryError)
    return isinstance(error, ray.exceptions.WorkerCrashedError | ray.exceptions.OutOfMemoryError)


def is_object_store_full(error: Exception) -> bool:
    """Return whether an object store had no room for a result, even by spilling to the disk."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    return isinstance(cause, ray.exceptions.ObjectStoreFullError | ray.exceptions.OutOfDiskError)


def build_failed_error(what: str, window_bytes: int, error: Exception) -> BuildFailed:
    """Return the error for a window whose builds failed repeatedly, the last with `error`. `what`: its name."""
    if is_object_store_full(error):
        return object_store_full_error(what, error)
    return BuildFailed(
        f"{what} could not be built: {MAX_DEATHS} processes in a row died building it; the last: {death_reason(error)}",
        remedy=f"lower data_service.workers, or give the nodes more memory (a build takes about "
        f"{(2 * window_bytes >> 20) + 1} MiB); {RAY_LOG_HINT}",
    )


def object_store_full_error(what: str, error: Exception) -> BuildFailed:
    """Return the error for data (`what`) that did not fit in Ray's object stores."""
    return BuildFailed(
        f"{what} found no room in Ray's object stores, which hold {object_store_bytes() >> 20} MiB: "
        f"{death_reason(error)}",
        remedy="lower data_service.memory, give the nodes more shared memory (launch: --shared-memory), or make room "
        "on the disk where Ray spills (RAY_object_spilling_directory, by default in the temporary folder)",
    )


def object_store_bytes() -> int:
    """Return the size of the object stores of all nodes together, in bytes."""
    return int(ray.cluster_resources().get("object_store_memory", 0))


def is_lost_result(error: Exception) -> bool:
    """Return whether the node or the result of a task was lost, rather than the task failed."""
    return isinstance(error, ray.exceptions.ObjectLostError | ray.exceptions.NodeDiedError)


def death_reason(error: Exception) -> str:
    """Return why a task died, in one line."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None else error
    return str(cause).strip().partition("\n")[0] or type(cause).__name__


def _build_slabs(spec_json: str, window: Window, layout: SlabLayout) -> list[Samples] | Samples:
    """Build a window in a Ray task; return its slabs, or a single slab itself, as Ray expects for one return value."""
    slabs = build_window(_corpora(spec_json), window, layout)
    return slabs if len(slabs) > 1 else slabs[0]


def _run_pass_part(job: CountingPass, spec_json: str, source: int, start: int, stop: int) -> PassResult:
    return job(_corpora(spec_json), source, start, stop)


_TASK = ray.remote(num_cpus=_TASK_CPUS, max_retries=0, scheduling_strategy="SPREAD")  # makes a Ray task of a function
_BUILD_TASK, _PASS_TASK = _TASK(_build_slabs), _TASK(_run_pass_part)


@lru_cache(maxsize=8)
def _corpora(spec_json: str) -> Corpora:
    """Return the opened corpora of a spec. Manifests and stores are opened once per worker process."""
    return Corpora(StreamSpec.model_validate_json(spec_json))
