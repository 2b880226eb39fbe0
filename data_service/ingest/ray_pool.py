"""Tasks over Ray. When a worker dies its task is done again; an error of the data is raised as it is."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayTaskError, WorkerCrashedError

from data_service.errors import CorpusError
from data_service.workers import installed_only

_RETRIES = 8
_OBJECT_STORE = 128 << 20  # tasks return receipts of a few KB

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def cluster(workers: int) -> Iterator[None]:
    """The cluster this process is connected to, else the one RAY_ADDRESS names, else one of its own."""
    if ray.is_initialized():
        yield
        return
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, job_config=installed_only())
    else:
        ray.init(
            address="local",
            num_cpus=workers,
            object_store_memory=_OBJECT_STORE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            job_config=installed_only(),
        )
    try:
        yield
    finally:
        ray.shutdown()


def run_on_ray(function: Callable[[T], R], tasks: Sequence[T], workers: int) -> Iterator[tuple[int, R]]:
    """(index, result) as tasks finish, at most `workers` at a time. Call within `cluster`.

    Raises:
        CorpusError: workers die again and again.
        whatever `function` raises.
    """
    remote = ray.remote(max_retries=_RETRIES, num_cpus=1)(_alone)
    waiting = iter(enumerate(tasks))
    running: dict[ray.ObjectRef, int] = {}
    try:
        while True:
            while len(running) < workers and (following := next(waiting, None)):
                running[remote.remote(function, following[1])] = following[0]
            if not running:
                return
            (finished,), _ = ray.wait(list(running), num_returns=1)
            yield running.pop(finished), _result(finished)
    finally:
        for reference in running:
            ray.cancel(reference)


def _alone(function: Callable[[T], R], task: T) -> R:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker has one core
    return function(task)


def _result(reference: ray.ObjectRef) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    except (WorkerCrashedError, OutOfMemoryError) as error:
        raise CorpusError(
            f"a worker died {_RETRIES + 1} times on the same part of the input: {error}",
            remedy="if memory ran out, use fewer --workers; the same command continues the build",
        ) from error
