"""The record of a burn-in: a JSON file that is rewritten after each check."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from data_service.formats import REMEDY, newer, says_newer
from launcher.errors import BurninError
from launcher.output import write_file
from launcher.plan.burnin.check import Form
from launcher.plan.burnin.report import Measured

RECORD, PAGE = "burnin.json", "burnin.html"
_BEGUN = 2  # starts that ended in the middle of a check, after which it is taken for what ended them

Status = Literal["passed", "failed", "died", "late", "skipped"]
"""`died`: the check's process was killed or crashed. `late`: its process took too long and was killed. `skipped`: this
machine lacks what the check needs."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Outcome(_Part):
    """The outcome of one check.

    Attributes:
        identity: digest of code and machine (`Machine.identity`).
        device: name of the device that it ran on.
        began: time of its start, UTC in ISO 8601.
        seconds: time that it took.
        lines: its findings.
        why: what ended it, or why it was skipped; empty if it passed.
    """

    status: Status
    identity: str
    form: Form
    device: str
    began: str
    seconds: float
    lines: tuple[Measured, ...] = ()
    why: str = ""


class Machine(_Part):
    """The machine on which checks run.

    Attributes:
        identity: digest of these facts, of our own code, and of the recipes asked for.
        device: name of the GPU or the processor.
        gpus: number of GPUs.
        memory: bytes of the first GPU's memory; 0 without one, and in records from before 2026-11-26.
        facts: versions, driver, memory and the like, by name.
    """

    identity: str
    form: Form
    device: str
    gpus: int
    memory: int = 0
    facts: dict[str, str]


class BurninRecord(_Part):
    """The whole file. `running`: how often each check was begun whose end is not on record."""

    version: Literal[1] = 1
    machine: Machine | None = None
    updated: str = ""
    running: dict[str, int] = {}
    outcomes: dict[str, Outcome] = {}

    def of(self, identity: str) -> dict[str, Outcome]:
        """Return the outcomes, by check, of this code on this machine."""
        return {name: one for name, one in self.outcomes.items() if one.identity == identity}


class RecordFile:
    """The record in `folder`. An unreadable file there is renamed and a new one begun.

    Raises:
        BurninError: a newer version wrote the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.record = self._read()

    def _read(self) -> BurninRecord:
        if not self.path.exists():
            return BurninRecord()
        try:
            found = json.loads(self.path.read_text("utf-8"))
            if says_newer({"format": found.get("version")} if isinstance(found, dict) else found):
                raise BurninError(newer(str(self.path)), remedy=f"{REMEDY}; or give another --out")
            return BurninRecord.model_validate(found)
        except (ValueError, RecursionError):
            self.path.replace(self.path.with_name(f"unreadable-{RECORD}"))
            return BurninRecord()

    def settle(self, machine: Machine) -> None:
        """Set the machine of this burn-in. Checks that were running when the last burn-in ended count as interrupted,
        and as `died` the second time.
        """
        often = {name: starts for name, starts in self.record.running.items() if starts >= _BEGUN}
        died = {
            name: Outcome(
                status="died",
                identity=machine.identity,
                form=machine.form,
                device=machine.device,
                began=now(),
                seconds=0.0,
                why=f"{starts} burn-ins ended while it ran",
            )
            for name, starts in often.items()
        }
        running = {name: starts for name, starts in self.record.running.items() if name not in often}
        self._write(machine=machine, running=running, outcomes={**self.record.outcomes, **died})

    def begin(self, name: str) -> None:
        starts = 1 + self.record.running.get(name, 0)
        self._write(running={**self.record.running, name: starts})

    def end(self, name: str, outcome: Outcome | None) -> None:
        """Record the outcome of a check. None: it was stopped without a fault of its own, and counts as not begun."""
        running = {other: starts for other, starts in self.record.running.items() if other != name}
        new = {} if outcome is None else {name: outcome}
        self._write(running=running, outcomes={**self.record.outcomes, **new})

    def _write(self, **changes: object) -> None:
        self.record = self.record.model_copy(update=changes | {"updated": now()})
        write_file(self.path, self.record.model_dump_json(indent=1) + "\n")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
