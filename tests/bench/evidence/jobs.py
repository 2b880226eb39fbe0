"""What there is to do, in order, each job in a process of its own, several side by side.

A job that is done ends at once, and one that was interrupted goes on, so all of them are started every time.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, get_args

from launcher.errors import OptionError

from .place import Place

Kind = Literal["run", "vectors"]
INTERRUPTED = 75  # exit code: start again to go on
_LAST = 2000  # characters of what a job said that are kept with its failure


@dataclass(frozen=True)
class Job:
    """One family and seed: a run with all that is measured of it, or what is trained on from it."""

    kind: Kind
    family: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.family}-{self.seed}"


def parse_job(text: str) -> Job:
    """`run-roberta-1`. Raises OptionError."""
    kind, _, rest = text.partition("-")
    family, _, seed = rest.rpartition("-")
    for known in get_args(Kind):
        if kind == known and family and seed.isdecimal():
            return Job(known, family, int(seed))
    raise OptionError(f"--job {text}: no such job", remedy="write KIND-FAMILY-SEED, as run-roberta-1")


def jobs_of(place: Place) -> list[Job]:
    """All of the first seed before any of the second; families that are trained on from come first, and that next."""
    wanted = place.comparison
    first = wanted.vectors.families
    others = [family for family in wanted.families if family not in first]
    return [
        job
        for seed in wanted.pretraining.seeds
        for job in (
            *(Job("run", family, seed) for family in first),
            *(Job("vectors", family, seed) for family in first),
            *(Job("run", family, seed) for family in others),
        )
    ]


class Lanes:
    """Runs jobs as processes, `count` at a time, until all are done or a stop is asked for (SIGINT, SIGTERM).

    Each has a core of its own: a rank uses as many threads as it may use cores, and those of several runs that share
    all cores wait for each other most of the time (ten times slower here).
    """

    def __init__(self, place: Place, count: int) -> None:
        self._place, self._count = place, count
        self._running: set[subprocess.Popen[bytes]] = set()
        self._cores: SimpleQueue[int] = SimpleQueue()
        usable = sorted(os.sched_getaffinity(0))
        for lane in range(count):
            self._cores.put(usable[lane % len(usable)])
        self.stopped = False

    def run(self, jobs: Sequence[Job], options: Sequence[str]) -> list[Job]:
        """Those that failed; why, is in `failures/` and on the page. `options` go to every process."""
        with self._passing_signals_on(), ThreadPoolExecutor(self._count) as pool:
            ended = list(pool.map(lambda job: self._one(job, options), jobs))
        return [job for job, code in zip(jobs, ended, strict=True) if code not in (0, INTERRUPTED)]

    def _one(self, job: Job, options: Sequence[str]) -> int:
        if self.stopped:
            return INTERRUPTED
        log = self._place.root / "logs" / f"{job}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        program = [sys.executable, str(Path(__file__).parent), str(self._place.root)]
        core = self._cores.get()
        with log.open("ab") as said:
            process = subprocess.Popen(
                [*program, *options, "--job", str(job), "--core", str(core)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # so that an interrupt reaches it once, from here
            )
            self._running.add(process)
            code = process.wait()
            self._running.discard(process)
        if self.stopped and code != 0:  # asked to stop before it could listen; what fails, will again
            code = INTERRUPTED
        self._cores.put(core)
        self._record(job, code, log)
        return code

    def _record(self, job: Job, code: int, log: Path) -> None:
        failure = self._place.root / "failures" / f"{job}.txt"
        failure.parent.mkdir(exist_ok=True)
        if code in (0, INTERRUPTED):
            failure.unlink(missing_ok=True)
        else:
            said = log.read_bytes()[-_LAST:].decode(errors="replace")
            failure.write_text(f"exit code {code}\n{said}", "utf-8")
        print(
            f"{job}: {'done' if code == 0 else 'interrupted' if code == INTERRUPTED else 'FAILED'}",
            flush=True,
        )

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        def stop(number: int, frame: object) -> None:
            self.stopped = True
            for process in list(self._running):
                process.send_signal(signal.SIGINT)

        before = [(number, signal.signal(number, stop)) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)


def interruptible() -> threading.Event:
    """In a job: SIGTERM interrupts as SIGINT does. The event is set by either, since training passes an interrupt on
    to its process and returns."""
    came = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        came.set()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    return came
