"""Trains steps of a run again, from a commit chosen at random, and compares them with the run's log bit for bit.

A step is a function of the weights before it and of its position in the data. So a fork of the commit, trained by as
many ranks, must log the same losses, norms of gradients and checksums of rows.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random

import numpy as np

from checkpoints.layout import CheckpointName
from checkpoints.listing import committed, on, read_manifest
from data_service.processes import temporary_folder
from data_service.store.base import Store
from launcher.errors import CertificateError
from launcher.runtime.cluster.ending import Ending, train
from launcher.runtime.run.fork import fork
from launcher.runtime.run.history import StepHistory, read_history
from launcher.runtime.run.record import Run
from launcher.runtime.run.stop import stop

_COMPARED = ("loss", "grad_norm", "lr", "tokens", "targets", "digest")
_ENDINGS = ("_loss", "_accuracy")
_POLL_S = 1.0


@dataclass(frozen=True)
class Retrained:
    """The result of training steps again.

    Attributes:
        first, stop: the steps [first, stop) that were trained and compared.
        ranks: number of ranks.
        differences: a line for every step that differs: the fields, with both values.
    """

    first: int
    stop: int
    ranks: int
    differences: tuple[str, ...]


def retrain(run: Run, steps: int, random: Random) -> Retrained:
    """Train at least `steps` steps after a commit of `run` again, fewer at the run's end, in a temporary folder.

    Args:
        random: draws the commit, of those that the run's log goes on from.

    Raises:
        CertificateError: the log has no step after a commit, or the steps could not be trained here.
        StoreError, CheckpointError: the run cannot be read.
    """
    logged = read_history(run.store).steps
    mark = random.choice(_candidates(run.store, logged))
    ranks = read_manifest(run.store, mark).world_size
    with temporary_folder("again") as folder:
        again = fork(run, str(folder / "run"), mark.step, (), keep_position=False, now=datetime.now(UTC)).run
        ending = _train_until(again, mark.step + steps, {"trainers": ranks, "logging.flush_seconds": _POLL_S})
        trained = read_history(again.store).steps
    if not len(trained):
        raise CertificateError(
            f"the steps after {mark.step:,} could not be trained here: {' '.join(ending.said.split()[-60:])}",
            remedy=f"use a machine on which {ranks} ranks can train this run",
        )
    common = np.intersect1d(logged.numbers, trained.numbers)
    differences = tuple(_differences(logged, trained, common))
    return Retrained(int(common[0]), int(common[-1]) + 1, ranks, differences)


def _candidates(store: Store, logged: StepHistory) -> Sequence[CheckpointName]:
    """Return the commits of the run's lineage after which steps are logged."""
    marks = committed(store)
    lineage = read_manifest(store, marks[0]).lineage if marks else ()
    numbers = set(logged.numbers.tolist())
    found = [mark for mark in marks if on(lineage, mark) and float(mark.step) in numbers]
    if not found:
        raise CertificateError(
            f"{store.uri}: no commit is kept after which the log has steps, so none can be trained again",
            remedy="keep more commits: checkpoint.keep_every, checkpoint.keep_last",
        )
    return found


def _train_until(run: Run, step: int, settings: dict[str, object]) -> Ending:
    """Train the run until step `step` is logged, or to its end."""
    enough = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, run.uri, settings, show=False)
        try:
            _stop_after(run, step, training, enough)
            return training.result()
        except BaseException:
            stop(run.store, time.time())
            raise


def _stop_after(run: Run, step: int, training: "Future[Ending]", tick: threading.Event) -> None:
    while not training.done():
        numbers = read_history(run.store, latest=1).steps.numbers
        if len(numbers) and numbers[-1] + 1 >= step:
            stop(run.store, time.time())
            return
        tick.wait(_POLL_S)


def _differences(logged: StepHistory, trained: StepHistory, common: "np.ndarray") -> Iterator[str]:
    fields = sorted(
        name for name in logged.fields & trained.fields if name in _COMPARED or name.endswith(_ENDINGS)
    )
    there, here = np.isin(logged.numbers, common), np.isin(trained.numbers, common)
    columns = {name: (logged.column(name)[there], trained.column(name)[here]) for name in fields}
    for row, step in enumerate(common.tolist()):
        pairs = {name: (then[row], now[row]) for name, (then, now) in columns.items()}
        wrong = [
            f"{name} {then!r} in the log, {now!r} here"
            for name, (then, now) in pairs.items()
            if then != now and not (np.isnan(then) and np.isnan(now))
        ]
        if wrong:
            yield f"step {int(step):,}: {'; '.join(wrong)}"
