"""Runs a build's tasks, stage by stage, here or on Ray."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from data_service.ingest.progress import Progress, Report, Stage
from data_service.ingest.receipts import Receipt, read_receipt
from data_service.store.base import Store

_REQUESTS = 16  # receipts looked up at once


class Task(Protocol):
    """A frozen, picklable piece of work that leaves a receipt under the key `receipt`.

    `sources` are hashes of what it is made from: a receipt is only good if its own is one of them. So what depends on
    an input that changed is done again, and nothing else.
    """

    @property
    def receipt(self) -> str: ...

    @property
    def input_bytes(self) -> int: ...

    @property
    def sources(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=Task)
R = TypeVar("R", bound=Receipt)


@dataclass(frozen=True)
class Work(Generic[T, R]):
    """A stage: its tasks, the module-level function that does one, and the type of receipt it returns."""

    stage: Stage
    tasks: Sequence[T]
    function: Callable[[T], R]
    receipt: type[R]


class Pool:
    """Where tasks run: this process for 0 or 1 workers, else Ray, started when there is a use for it."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._cluster = ExitStack()
        self._started = False

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *failure: object) -> None:
        self._cluster.close()

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """(index, receipt) as tasks finish. Raises whatever `function` raises."""
        if self._workers <= 1 or len(tasks) <= 1:
            return ((index, function(task)) for index, task in enumerate(tasks))
        from data_service.ingest.ray_pool import cluster, run_on_ray  # Ray takes a second to import

        if not self._started:
            self._cluster.enter_context(cluster(self._workers))
            self._started = True
        return run_on_ray(function, tasks, self._workers)


def run_stage(work: Work[T, R], store: Store, pool: Pool, report: Report) -> list[R]:
    """Receipts of all tasks, in their order. What has a receipt already is not done again.

    Raises:
        whatever the stage's function raises, as it is; work that was finished before stays finished.
    """
    total_bytes = sum(task.input_bytes for task in work.tasks)
    receipts = _find_receipts(work, store)
    missing = [index for index, receipt in enumerate(receipts) if receipt is None]

    def report_now() -> None:
        done = [task.input_bytes for task, receipt in zip(work.tasks, receipts, strict=True) if receipt]
        report(Progress(work.stage, len(done), len(work.tasks), sum(done), total_bytes))

    report_now()
    for position, receipt in pool.run(work.function, [work.tasks[index] for index in missing]):
        receipts[missing[position]] = receipt
        report_now()
    return [receipt for receipt in receipts if receipt is not None]


def _find_receipts(work: Work[T, R], store: Store) -> list[R | None]:
    folders = {task.receipt.rpartition("/")[0] + "/" for task in work.tasks}
    written = {entry.key for folder in folders for entry in store.list(folder)}

    def find(task: T) -> R | None:
        found = read_receipt(store, task.receipt, work.receipt) if task.receipt in written else None
        return found if found is not None and found.source in task.sources else None

    with ThreadPoolExecutor(_REQUESTS) as threads:
        return list(threads.map(find, work.tasks))
