"""Runs a build's tasks, stage by stage, in this process or on Ray, and reports progress."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from data_service.corpus.manifest import BUILD_FOLDER, BuildLayout
from data_service.ingest.inputs import InputFile
from data_service.ingest.streamed import MeasuredFile, MeasureTask, PieceReader, measure_file
from data_service.ingest.tasks import R, SplitTask, T, find_receipts, hash_strings, run_task
from data_service.store.base import Entry, Store, parallel_map

_DELETE_BATCH = 1000  # objects that one request deletes
L = TypeVar("L", bound=BuildLayout)


@dataclass(frozen=True)
class Progress:
    """The progress of a stage: tasks done and bytes of input read. Tasks done by an interrupted build count as done.

    `stage`: the name that is shown to the user. "measuring" occurs only with big compressed files. A complete corpus
    gives one report "already built", and "clearing up" if an interrupted build left files. "clearing up" also comes
    before "reading" if another build left files.
    """

    stage: str
    done: int
    total: int
    bytes_done: int
    bytes_total: int


ReportProgress = Callable[[Progress], None]  # is called in this process as tasks finish


if TYPE_CHECKING:
    from data_service.ingest.ray_pool import RayPool


class WorkerPool(ExitStack):
    """The workers that run tasks: this process for 0 or 1 workers, else Ray, which starts at the first use.

    `piece_bytes`: largest number of bytes of text that is sent with a task; 0 if no file is streamed.
    """

    def __init__(self, workers: int, piece_bytes: int) -> None:
        super().__init__()
        self._workers, self._piece_bytes = workers, piece_bytes
        self._ray: "RayPool | None" = None

    def run(self, function: Callable[[T, Store], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """Run the tasks; yield (index, receipt) as they finish. Raises whatever `function` raises."""
        if self._workers <= 1 or len(tasks) <= 1:
            return _run_in_process(function, tasks)
        if self._ray is None:
            from data_service.ingest.ray_pool import ray_pool  # Ray takes a second to import

            self._ray = self.enter_context(ray_pool(self._workers, self._piece_bytes))
        return self._ray.run(function, tasks)


def _run_in_process(function: Callable[[T, Store], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
    reader = PieceReader()
    for index, task in enumerate(tasks):
        if isinstance(task, SplitTask) and task.split.streamed_piece:
            task = task.with_piece(reader.read(task.split.streamed_piece, task.options))
        yield index, run_task(function, task)


@dataclass(frozen=True)
class StageRunner(Generic[L]):
    """Runs the stages of a build or a preparation."""

    layout: L
    pool: WorkerPool
    progress: ReportProgress

    def run_stage(
        self, stage: str, tasks: Sequence[T], function: Callable[[T, Store], R], *, receipt: type[R]
    ) -> list[R]:
        """Run a stage; return the receipts of all tasks, in order. A task that has a receipt already is not repeated.

        Args:
            function: module-level function that does a task, given the store at the root of the output.
            receipt: type of the receipts that `function` returns.

        Raises whatever `function` raises. Tasks that finished before the error need not be repeated.
        """
        total_bytes = sum(task.input_bytes for task in tasks)
        receipts = find_receipts(self.layout.open_output(), tasks, receipt)
        missing = [index for index, found in enumerate(receipts) if found is None]

        def report_now() -> None:
            done = [task.input_bytes for task, found in zip(tasks, receipts, strict=True) if found]
            self.progress(Progress(stage, len(done), len(tasks), sum(done), total_bytes))

        report_now()
        for position, finished in self.pool.run(function, [tasks[index] for index in missing]):
            receipts[missing[position]] = finished
            report_now()
        return [found for found in receipts if found is not None]

    def measure_streamed_files(self, files: Sequence[InputFile]) -> tuple[dict[str, int], Self]:
        """Return the decompressed sizes of big packed files, by URI, and the runner of the stages that follow.

        The sizes determine where splits begin, so the next runner's keys contain a hash of them. The files of other
        builds below `build/` are deleted.
        """
        if not files:
            self._remove_other_builds()
            return {}, self
        tasks = [
            MeasureTask(self.layout, index, f"{file.version} {file.uri}", file) for index, file in enumerate(files)
        ]
        measured = self.run_stage("measuring", tasks, measure_file, receipt=MeasuredFile)
        sizes = {file.uri: found.plain_size for file, found in zip(files, measured, strict=True)}
        lengths = (f"{size} {uri}" for uri, size in sorted(sizes.items()))
        build = hash_strings([self.layout.build, *lengths])[:16]
        self._remove_other_builds(build)
        return sizes, replace(self, layout=replace(self.layout, build=build))

    def _remove_other_builds(self, build: str = "") -> None:
        """Delete the intermediate files of all builds except this one and `build`, its name after measuring.

        Receipts of other builds would seem valid if this build overwrites their shards with equally large ones.
        """
        store = self.layout.open_output()
        for name in list(store.with_prefix(BUILD_FOLDER.rstrip("/")).folders()):
            if name not in (self.layout.build, build):
                remove_objects(store, f"{BUILD_FOLDER}{name}/", self.progress)


def remove_build_files(store: Store, progress: ReportProgress) -> None:
    """Delete the intermediate objects of a finished build, and leftovers of interrupted writes."""
    remove_objects(store, BUILD_FOLDER, progress)
    store.remove_leftovers("", older_than_key=None)


def remove_foreign_objects(store: Store, folders: Iterable[str], own: Container[str]) -> None:
    """Delete what abandoned builds left in `folders` of the output: all keys that are not among `own`."""
    there = [entry.key for folder in folders for entry in store.list(folder)]
    store.delete_many([key for key in there if key not in own])


def remove_objects(store: Store, prefix: str, progress: ReportProgress) -> None:
    """Delete all objects whose keys begin with `prefix`."""
    entries = list(store.list(prefix))
    batches = [entries[start : start + _DELETE_BATCH] for start in range(0, len(entries), _DELETE_BATCH)]
    total = sum(entry.size for entry in entries)
    done = size = 0

    def delete(batch: list[Entry]) -> list[Entry]:
        store.delete_many([entry.key for entry in batch])
        return batch

    for batch in parallel_map(delete, batches):
        done, size = done + len(batch), size + sum(entry.size for entry in batch)
        progress(Progress("clearing up", done, len(entries), size, total))
