"""Runs tasks on Ray. If a worker dies, its task is repeated; an error in the data is raised unchanged.

A few actors read the big compressed files, one file at a time each. The text of a piece is sent from the actor's node
to the task's node, never through this process. The result of an actor depends only on the piece. So if an actor dies,
Ray may repeat the call on another node, where the actor skips to the piece by decompressing.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from data_service.errors import CorpusError, RayLost, UserError
from data_service.ingest.inputs import InputFile
from data_service.ingest.streamed import PieceReader
from data_service.ingest.tasks import BuildTask, FilePiece, R, SplitTask, T, run_task
from data_service.service.ray_internals import dead_processes, start_ray
from data_service.store.base import Store

_MAX_RETRIES = 8  # repetitions of a task whose worker or reader died
_OBJECT_STORE_BYTES = 128 << 20  # Ray's object store: room for small receipts, without that for pieces of text
_WORKERS_PER_READER = 8  # one reader decompresses as fast as 2 to 4 workers hash, or 50 encode
_WORKER_DEATH_ERRORS = (WorkerCrashedError, OutOfMemoryError, RayActorError, ObjectLostError)
_REPEAT_REMEDY = "run the same command again, which continues the work, or run it with --workers 1"
_CHECK_INTERVAL_S = 2.0  # seconds between checks that Ray's own processes are alive
_FULL_STORE_ERRORS = (ObjectStoreFullError, OutOfDiskError)

_Item = TypeVar("_Item")


@contextmanager
def ray_pool(workers: int, piece_bytes: int) -> Iterator["RayPool"]:
    """Yield a pool of workers on the cluster that this process is connected to, else on the one that RAY_ADDRESS names,
    else on a Ray that is started here.

    The object store of a Ray that is started here has room for all pieces of `piece_bytes` in transit.
    """
    with ExitStack() as stack:
        if not ray.is_initialized():
            _connect_to_ray(workers, piece_bytes)
            stack.callback(ray.shutdown)
        readers = _ReaderActors(_reader_count(workers))
        stack.callback(readers.close)
        yield RayPool(workers, readers)


def _connect_to_ray(workers: int, piece_bytes: int) -> None:
    """Connect to Ray, or start it. Raises RayLost: Ray did not answer in time."""
    memory = _OBJECT_STORE_BYTES + piece_bytes * (workers + _reader_count(workers) + 1)
    try:
        with _keep_sigterm_handler():
            start_ray(num_cpus=workers, object_store_memory=memory)
    except UserError:
        raise
    except Exception as error:  # Ray raises plain Exception if a busy machine takes too long
        raise RayLost(f"Ray did not start: {error}", remedy=_REPEAT_REMEDY) from error


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM after the `with` block, in which Ray installs one that ends this process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


class RayPool:
    """A pool that runs at most `workers` tasks at a time.

    Readers stay alive through all stages, because starting one takes a second of CPU time.
    """

    def __init__(self, workers: int, readers: "_ReaderActors") -> None:
        self._workers, self._readers = workers, readers

    def run(self, function: Callable[[T, Store], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """Run the tasks; yield (index, receipt) as they finish.

        Raises:
            CorpusError: workers or readers died repeatedly.
            RayLost: processes of Ray itself have died.
            InputError, StoreError: a reader cannot read a file.

        Errors of `function` are raised unchanged.
        """
        remote = ray.remote(max_retries=_MAX_RETRIES, num_cpus=1)(_run_single_threaded)
        waiting = _prefetch(self._readers.iter_pieces(tasks), _reader_count(self._workers))
        running: dict[ray.ObjectRef, int] = {}
        try:
            while True:
                while len(running) < self._workers and (following := next(waiting, None)):
                    index, text = following
                    running[remote.remote(function, tasks[index], text)] = index
                if not running:
                    return
                for finished in ray.wait(list(running), num_returns=1, timeout=_CHECK_INTERVAL_S)[0]:
                    yield running.pop(finished), _fetch_receipt(finished)
                _check_ray_alive()
        except RayError as error:
            raise RayLost(f"Ray has failed: {type(error).__name__}: {error}", remedy=_REPEAT_REMEDY) from error
        finally:
            if not dead_processes():  # if Ray's own processes died, tasks cannot be cancelled
                for reference in running:
                    ray.cancel(reference)


def _check_ray_alive() -> None:
    """Raise RayLost if a process of the Ray that was started here has died. Ray itself would notice much later."""
    if dead := dead_processes():
        raise RayLost(f"Ray is lost: its {dead[0]} has died", remedy=_REPEAT_REMEDY)


class _ReaderActors:
    """At most `count` Ray actors that read pieces, started on demand. Each reads every `count`-th streamed file."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kind = ray.remote(num_cpus=0, max_restarts=_MAX_RETRIES, max_task_retries=_MAX_RETRIES)(PieceReader)
        self._actors: dict[int, Any] = {}

    def iter_pieces(self, tasks: Sequence[Any]) -> Iterator[tuple[int, ray.ObjectRef | None]]:
        """Yield (index, reference) for every task: the reference to its piece with text; None without a streamed piece.

        The tasks of the different actors, and tasks without a streamed piece, alternate.
        """
        files: dict[InputFile, list[int]] = {}
        alone: list[int] = []
        for index, task in enumerate(tasks):
            piece = _streamed_piece(task)
            (files.setdefault(piece.file, []) if piece else alone).append(index)
        shares = [chain.from_iterable(list(files.values())[i :: self._count]) for i in range(self._count)]
        queues = dict(enumerate([*shares, iter(alone)]))
        while queues:
            for number, queue in list(queues.items()):
                following = next(queue, None)
                if following is None:
                    del queues[number]
                else:
                    yield following, self._request_piece(number, tasks[following])

    def close(self) -> None:
        """Kill the actors."""
        if not dead_processes():
            for actor in self._actors.values():
                ray.kill(actor)

    def _request_piece(self, number: int, task: Any) -> ray.ObjectRef | None:
        piece = _streamed_piece(task)
        if piece is None:
            return None
        if number not in self._actors:
            self._actors[number] = self._kind.remote()
        reference: ray.ObjectRef = self._actors[number].read.remote(piece, task.options)
        return reference


def _streamed_piece(task: BuildTask) -> FilePiece | None:
    return task.split.streamed_piece if isinstance(task, SplitTask) else None


def _reader_count(workers: int) -> int:
    """Return the number of readers, which is also the number of pieces that are read ahead of the workers."""
    return -(-workers // _WORKERS_PER_READER)


def _prefetch(items: Iterator[_Item], count: int) -> Iterator[_Item]:
    """Yield the items. Up to `count` of them are computed ahead."""
    made = deque(islice(items, count))
    while made:
        made.extend(islice(items, 1))
        yield made.popleft()


def _run_single_threaded(function: Callable[[Any, Store], R], task: Any, piece: FilePiece | None) -> R:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for tokenizers, because a worker has one core
    return run_task(function, task if piece is None else task.with_piece(piece))


def _fetch_receipt(reference: ray.ObjectRef) -> Any:
    """Return the receipt of a finished task. Raises the errors of `RayPool.run`."""
    try:
        return ray.get(reference)
    except RayError as error:
        cause: object = error
        while isinstance(cause, RayTaskError):  # a reader's error is the cause of its task's error
            cause = cause.cause
        if isinstance(cause, _WORKER_DEATH_ERRORS):
            raise CorpusError(
                f"a worker died {_MAX_RETRIES + 1} times on the same part of the input: {cause}",
                remedy="if memory ran out, use fewer --workers; the same command continues the build",
            ) from error
        if isinstance(cause, _FULL_STORE_ERRORS):
            raise CorpusError(
                f"Ray's object store is full of pieces of the input: {cause}",
                remedy="use fewer --workers, or make room on the disk where Ray spills "
                "(RAY_object_spilling_directory); the same command continues the build",
            ) from error
        if isinstance(cause, Exception) and cause is not error:
            raise cause from error
        raise
