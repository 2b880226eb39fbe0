"""A burn-in: checks one after another, each in a process of its own, until all are done or the time is over.

What passed with the same code on the same machine is not done again. A check whose process died or hung is not begun
again either, unless it is asked for by name: it may take the machine with it.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.burnin.check import Check, Form, Request
from launcher.burnin.page import first_line, render
from launcher.burnin.processes import Ended, run_process
from launcher.burnin.record import PAGE, Machine, Outcome, RecordFile, Status, now
from launcher.burnin.report import Mark, read_report
from launcher.errors import BurninError
from launcher.output import write_file

_PROBE_S = 300.0  # to import torch from a slow disk and to ask the driver
_LEFT_S = 5.0  # a check is not begun with less time


@dataclass(frozen=True)
class Wanted:
    """What a burn-in is asked for.

    Attributes:
        checks: in the order in which they are to be done. named: they were asked for by name.
        recipes: see `Request`. minutes: that it may take; None: as many as it takes.
        form: None: on a GPU where there is one.
    """

    checks: Sequence[Check]
    recipes: tuple[str, ...]
    folder: Path
    minutes: float | None = None
    form: Form | None = None
    named: bool = False


@dataclass(frozen=True)
class Burnin:
    """What is on record afterwards, and which checks were left for another start."""

    machine: Machine
    outcomes: dict[str, Outcome]
    left: tuple[str, ...]

    @property
    def failed(self) -> list[str]:
        return [name for name, one in self.outcomes.items() if one.status not in ("passed", "skipped")]


def burn_in(wanted: Wanted, tell: Callable[[str], None]) -> Burnin:
    """Do what is wanted; record and page lie in its folder after each check. `tell` gets lines for a person.

    Raises BurninError: this machine cannot even be asked what it is. OutputError: the folder cannot be written.
    """
    deadline = float("inf") if wanted.minutes is None else time.monotonic() + 60 * wanted.minutes
    file = RecordFile(wanted.folder)
    machine = _probe(wanted)
    file.settle(machine)
    tell(f"{machine.device}: {machine.form} form, into {wanted.folder}")
    _write_page(file, wanted)
    for check in _to_do(wanted, file, machine):
        remaining = deadline - time.monotonic()
        if remaining < max(_LEFT_S, check.seconds(machine.form)):
            continue
        file.begin(check.name)
        outcome = _carry_out(check, wanted, machine, remaining)
        file.end(check.name, outcome)
        _write_page(file, wanted)
        if outcome is not None:
            tell(f"{outcome.status:8} {check.name} ({outcome.seconds:.0f} s) {first_line(outcome.why)}")
    found = file.record.of(machine.identity)
    return Burnin(machine, found, tuple(one.name for one in wanted.checks if one.name not in found))


def _to_do(wanted: Wanted, file: RecordFile, machine: Machine) -> list[Check]:
    """What has never come to its end first, then what failed; what is asked for by name in any case."""
    found = file.record.of(machine.identity)
    if wanted.named:
        return [one for one in wanted.checks if one.name not in found or found[one.name].status != "passed"]
    new = [one for one in wanted.checks if one.name not in found]
    again = [
        one for one in wanted.checks if one.name in found and found[one.name].status in ("failed", "skipped")
    ]
    return new + again


def _probe(wanted: Wanted) -> Machine:
    """Asked in a process of its own, so that this one never meets the driver."""
    with tempfile.TemporaryDirectory(prefix="maskfleet-burnin-") as folder:
        answer = Path(folder, "machine.json")
        words = [wanted.form or "", " ".join(wanted.recipes), str(answer)]
        ended = run_process(
            "launcher.burnin.machine", words, _hidden(wanted.form), Path(folder, "log"), _PROBE_S
        )
        if not answer.exists():
            raise BurninError(
                f"the process that looks for devices failed ({ended.how}): {ended.said}",
                remedy="torch must be importable and the driver must answer; or give --tiny for the CPU alone",
            )
        return Machine.model_validate_json(answer.read_text("utf-8"))


def _hidden(form: Form | None) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ""} if form == "cpu" else {}


def _carry_out(check: Check, wanted: Wanted, machine: Machine, remaining: float) -> Outcome | None:
    """None: the burn-in's time was over first."""
    folder = Path(tempfile.mkdtemp(prefix=f"{check.name}-", dir=_folder(wanted.folder / "work")))
    report, log, own = folder / "report.jsonl", folder / "log", folder / "own"
    own.mkdir()
    request = Request(form=machine.form, recipes=wanted.recipes, folder=str(folder))
    limit, began = check.limit(machine.form), now()
    environment = {**_environment(wanted, machine.form), **dict(check.environment)}
    words = [check.name, request.model_dump_json(), str(report), str(own)]
    ended = run_process("launcher.burnin.child", words, environment, log, min(limit, remaining))
    if ended.late and remaining < limit:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    lines, marks = read_report(report)
    status, why = _judged(ended, [line.right for line in lines], marks)
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome(
        status=status,
        identity=machine.identity,
        form=machine.form,
        device=machine.device,
        began=began,
        seconds=round(ended.seconds, 2),
        lines=tuple(lines),
        why=why,
    )


def _judged(ended: Ended, right: Sequence[bool | None], marks: Sequence[Mark]) -> tuple[Status, str]:
    """A status, and why it is not `passed`."""
    last = marks[-1] if marks else None
    if last is not None and last.kind == "skipped":
        return "skipped", last.text
    if last is not None and last.kind == "failed":
        return "failed", last.text
    if last is not None and last.kind == "ended":
        wrong = sum(one is False for one in right)
        return ("failed", f"{wrong} of {len(right)} findings are wrong") if wrong else ("passed", "")
    doing = "" if last is None else f" while it did: {last.text}"
    said = f"\n{ended.said}" if ended.said else ""
    return ("late" if ended.late else "died"), f"{ended.how}{doing}{said}"


def _environment(wanted: Wanted, form: Form) -> dict[str, str]:
    """Compiled kernels lie in the burn-in's folder, so that a second start has them and nothing else is touched."""
    caches = _folder(wanted.folder / "compiled")
    found = {"TRITON_CACHE_DIR": str(caches / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    found |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if form == "gpu":
        return found | {"TRITON_INTERPRET": "0"}
    return found | {"TRITON_INTERPRET": "1", **_hidden("cpu")}


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def _write_page(file: RecordFile, wanted: Wanted) -> None:
    write_file(wanted.folder / PAGE, render(file.record, wanted.checks))
