"""Runs the tasks of one stage, here or on Ray; what is finished already is not done again."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from data_service.ingest.progress import Progress, Report, Stage
from data_service.ingest.receipts import Receipt, read_receipt
from data_service.store.base import Store

_REQUESTS = 16  # receipts looked up at once


class Task(Protocol):
    """A frozen, picklable piece of work that leaves a receipt under the key `receipt`."""

    @property
    def receipt(self) -> str: ...

    @property
    def input_bytes(self) -> int: ...


T = TypeVar("T", bound=Task)
R = TypeVar("R", bound=Receipt)


@dataclass(frozen=True)
class Work(Generic[T, R]):
    """A stage: its tasks, the module-level function that does one, and the type of receipt it returns."""

    stage: Stage
    tasks: Sequence[T]
    function: Callable[[T], R]
    receipt: type[R]


def run_stage(work: Work[T, R], store: Store, workers: int, report: Report) -> list[R]:
    """Receipts of all tasks, in their order.

    Raises:
        whatever `function` raises, as it is; work that was finished before stays finished.
    """
    total_bytes = sum(task.input_bytes for task in work.tasks)
    receipts: list[R | None] = _find_receipts(work, store)
    missing = [index for index, receipt in enumerate(receipts) if receipt is None]

    def report_now() -> None:
        done = [task.input_bytes for task, receipt in zip(work.tasks, receipts, strict=True) if receipt]
        report(Progress(work.stage, len(done), len(work.tasks), sum(done), total_bytes))

    report_now()
    for position, receipt in _run(work.function, [work.tasks[index] for index in missing], workers):
        receipts[missing[position]] = receipt
        report_now()
    return [receipt for receipt in receipts if receipt is not None]


def _find_receipts(work: Work[T, R], store: Store) -> list[R | None]:
    written = {entry.key for folder in _folders(work.tasks) for entry in store.list(folder)}
    keys = [task.receipt if task.receipt in written else None for task in work.tasks]
    with ThreadPoolExecutor(_REQUESTS) as threads:
        return list(threads.map(lambda key: key and read_receipt(store, key, work.receipt), keys))


def _folders(tasks: Sequence[T]) -> set[str]:
    return {task.receipt.rpartition("/")[0] + "/" for task in tasks}


def _run(function: Callable[[T], R], tasks: Sequence[T], workers: int) -> Iterator[tuple[int, R]]:
    if workers <= 1 or len(tasks) <= 1:
        return ((index, function(task)) for index, task in enumerate(tasks))
    from data_service.ingest.ray_pool import run_on_ray  # Ray takes a second to import

    return run_on_ray(function, tasks, workers)
