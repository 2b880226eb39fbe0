"""A burn-in: checks, each in a process of its own, until all are done or time is up. On a GPU several run at a time.

A check that passed with the same code on the same machine is not repeated. A check whose process died or hung is
repeated only if it is asked for by name, because it may crash the machine.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from encoder_core.trials.trial_process import Deadline, TrialEnded, follow
from launcher.errors import BurninError
from launcher.output import write_file
from launcher.plan.burnin.check import Check, Form, Request
from launcher.plan.burnin.checks import TARGET
from launcher.plan.burnin.page import first_line, render
from launcher.plan.burnin.record import PAGE, Machine, Outcome, RecordFile, Status, now
from launcher.plan.burnin.report import Mark, Measured

_PROBE_S = 300.0  # to import torch from a slow disk and to ask the driver
_MOST_JOBS, _CORES = 8, 2  # checks at a time on a GPU; cores of each
_MEMORY = 12 << 30  # bytes of the GPU's memory for each: BERT-large in full size, or a row of 8,192 in fp64
_LEFT_S = 5.0  # a check is not begun with less time


@dataclass(frozen=True)
class BurninRequest:
    """The request for a burn-in.

    Attributes:
        checks: the checks, in order.
        recipes: recipes of `Request`.
        folder: folder of record, page and compiled code.
        minutes: time limit; None: no limit.
        form: form of the checks; None: "gpu" where there is a GPU.
        named: whether the checks were asked for by name.
    """

    checks: Sequence[Check]
    recipes: tuple[str, ...]
    folder: Path
    minutes: float | None = None
    form: Form | None = None
    named: bool = False


@dataclass(frozen=True)
class Burnin:
    """The outcomes on record after a burn-in, and the checks that are left for another start."""

    machine: Machine
    outcomes: dict[str, Outcome]
    left: tuple[str, ...]

    @property
    def failed(self) -> list[str]:
        return [name for name, one in self.outcomes.items() if one.status not in ("passed", "skipped")]


def burn_in(wanted: BurninRequest, tell: Callable[[str], None]) -> Burnin:
    """Carry out the checks of `wanted`, and update record and page after each. `tell` receives lines for a person.

    Raises:
        BurninError: the machine cannot be described, because torch or the driver does not answer.
        OutputError: the folder cannot be written.
    """
    deadline = float("inf") if wanted.minutes is None else time.monotonic() + 60 * wanted.minutes
    file = RecordFile(wanted.folder)
    machine = _probe(wanted)
    file.settle(machine)
    tell(f"{machine.device}: {machine.form} form, into {wanted.folder}")
    _write_page(file, wanted)
    work = _Work(wanted, file, machine, deadline, tell)
    for beside, group in groupby(_to_do(wanted, file, machine), lambda check: check.beside):
        with ThreadPoolExecutor(_jobs(machine) if beside else 1, "check") as pool:
            try:
                list(pool.map(work.do, group))
            except BaseException:  # an interrupt from the keyboard, too, ends what is under way
                work.stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
    found = file.record.of(machine.identity)
    return Burnin(machine, found, tuple(one.name for one in wanted.checks if one.name not in found))


def _jobs(machine: Machine) -> int:
    """Return how many checks run at a time. On a GPU they mostly wait for compilers and for the CPU that they are
    compared with.
    """
    cores = len(os.sched_getaffinity(0))
    room = min(_MOST_JOBS, cores // _CORES, machine.memory // _MEMORY)
    return max(1, room) if machine.form == "gpu" else 1


@dataclass
class _Work:
    """Carries out checks, several at a time."""

    wanted: BurninRequest
    file: RecordFile
    machine: Machine
    deadline: float
    tell: Callable[[str], None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)

    def do(self, check: Check) -> None:
        """Carry out `check` if enough time is left."""
        remaining = self.deadline - time.monotonic()
        if remaining < max(_LEFT_S, check.seconds(self.machine.form)):
            return
        with self.lock:
            self.file.begin(check.name)
            _write_page(self.file, self.wanted)
        outcome = None
        try:
            outcome = _carry_out(check, self.wanted, self.machine, remaining, self.stopped)
        finally:
            with self.lock:
                self.file.end(check.name, outcome)
                _write_page(self.file, self.wanted)
        if outcome is not None:
            why = first_line(outcome.why)
            self.tell(f"{outcome.status:8} {check.name} ({outcome.seconds:.0f} s) {why}".rstrip())


def _to_do(wanted: BurninRequest, file: RecordFile, machine: Machine) -> list[Check]:
    """Return the checks to run: those without an outcome first, then those that failed. Checks asked for by name run
    unless they passed.
    """
    found = file.record.of(machine.identity)
    if wanted.named:
        return [one for one in wanted.checks if one.name not in found or found[one.name].status != "passed"]
    new = [one for one in wanted.checks if one.name not in found]
    again = [
        one for one in wanted.checks if one.name in found and found[one.name].status in ("failed", "skipped")
    ]
    return new + again


class _Over(Exception):
    """A process has used up its time."""


def _heard(
    target: str,
    request: Mapping[str, Any],
    seconds: float,
    environment: Mapping[str, str],
    stopped: threading.Event | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield what a process reports.

    Raises:
        TrialEnded: the process crashed.
        _Over: it was stopped, or was not done after `seconds`.
    """
    end = time.monotonic() + seconds

    def tick() -> None:
        if time.monotonic() > end or (stopped is not None and stopped.is_set()):
            raise _Over

    with closing(follow(target, request, Deadline(float("inf")), tick, environment)) as reports:
        yield from reports


def _probe(wanted: BurninRequest) -> Machine:
    """Ask a process of its own what the machine is, so that this process never loads the driver."""
    request = {"form": wanted.form, "recipes": list(wanted.recipes)}
    try:
        for answer in _heard("launcher.plan.burnin.machine:serve", request, _PROBE_S, _hidden(wanted.form)):
            return Machine.model_validate(answer["machine"])
    except (TrialEnded, _Over) as ended:
        raise BurninError(
            f"the process that describes this machine's devices did not answer: {ended}",
            remedy="torch must be importable and the driver must answer; or give --tiny for the CPU alone",
        ) from ended
    raise BurninError(
        "the process that describes this machine's devices reported nothing",
        remedy="give --tiny for the CPU alone",
    )


def _hidden(form: Form | None) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ""} if form == "cpu" else {}


def _carry_out(
    check: Check, wanted: BurninRequest, machine: Machine, remaining: float, stopped: threading.Event
) -> Outcome | None:
    """Carry a check out and return its outcome. None: the burn-in was stopped, or its time was up first."""
    folder = Path(tempfile.mkdtemp(prefix=f"{check.name}-", dir=_folder(wanted.folder / "work")))
    request = Request(form=machine.form, recipes=wanted.recipes, folder=str(folder))
    asked = {"check": check.name, "request": request.model_dump(mode="json"), "folder": str(folder)}
    limit, began, started = check.limit(machine.form), now(), time.monotonic()
    environment = {**_environment(wanted, machine.form), **dict(check.environment)}
    measured, marks = list[Measured](), list[Mark]()
    status: Status | None = None
    why = ""
    try:
        for told in _heard(TARGET, asked, min(limit, remaining), environment, stopped):
            if "mark" in told:
                marks.append(Mark.model_validate(told["mark"]))
            else:
                measured.append(Measured.model_validate(told["measured"]))
    except _Over:
        if remaining < limit or stopped.is_set():
            return None
        status, why = "late", f"it was not done after {limit:.0f} s{_meanwhile(marks)}"
    except TrialEnded as ended:
        status, why = "died", f"{ended}{_meanwhile(marks)}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if status is None:
        status, why = _judged([one.right for one in measured], marks)
    return Outcome(
        status=status,
        identity=machine.identity,
        form=machine.form,
        device=machine.device,
        began=began,
        seconds=round(time.monotonic() - started, 2),
        lines=tuple(measured),
        why=why,
    )


def _meanwhile(marks: Sequence[Mark]) -> str:
    return f", while it did: {marks[-1].text}" if marks else ""


def _judged(right: Sequence[bool | None], marks: Sequence[Mark]) -> tuple[Status, str]:
    """Return the status of a process that finished, and the reason if it is not `passed`."""
    last = marks[-1]
    if last.kind == "skipped":
        return "skipped", last.text
    if last.kind == "failed":
        return "failed", last.text
    wrong = sum(one is False for one in right)
    return ("failed", f"{wrong} of {len(right)} findings are wrong") if wrong else ("passed", "")


def _environment(wanted: BurninRequest, form: Form) -> dict[str, str]:
    """Return variables for the check's process. Compiled kernels lie in the burn-in's folder: a second start finds
    them, and no other folder is touched.
    """
    caches = _folder(wanted.folder / "compiled")
    found = {"TRITON_CACHE_DIR": str(caches / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    found |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if form == "gpu":
        return found | {"TRITON_INTERPRET": "0"}
    return found | {"TRITON_INTERPRET": "1", **_hidden("cpu")}


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def _write_page(file: RecordFile, wanted: BurninRequest) -> None:
    write_file(wanted.folder / PAGE, render(file.record, wanted.checks))
