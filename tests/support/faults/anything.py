"""Any fault, any process, any moment: a run that is struck again and again, its command repeated as a scheduler would.

Whatever is against the rule is noted, with what was done and shown, and the run goes on as long as it can.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launcher.exit_codes import REPEAT, STOPPED
from tests.support.faults.draws import GROUP, OUTAGES, STARTS, STORE, Fault, Phase
from tests.support.runs.observer import COMMAND, MARK, Processes, StoreView, listens
from tests.support.stores.fault_proxy import FaultProxy

WENT_ON = "went on"
BARREN = 5  # faults in a row without a commit; then the run is let alone until it has made one
IMPORTS_S = 3.0  # the least that a command takes until Ray is up
WRONG = 2  # wrong ends without a commit or a fault between; after more the run is given up
ENDS = 10  # the same for ends of any kind
STILL_S = 300.0  # without any sign of life a command is stuck
LEFT_S = 30.0  # for everything to end after the last command
_SHORT = "/tmp"  # paths of Ray's sockets must be
_TICK_S, _BRIEF_S = 0.1, 0.002  # between two looks; for what is soon over
_BRIEF: tuple[Phase, ...] = ("evaluation", "saving")


@dataclass
class Disturbed:
    """A run under its faults, until it is finished.

    Attributes:
        log: what struck, as records of JSON lines.
        problems: whatever is against the rule, in words.
    """

    uri: str
    name: str
    steps: int
    every: int
    faults: Sequence[Fault]
    proxy: FaultProxy | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mf-", dir=_SHORT))
        self._processes = Processes(f"{MARK}={self._folder.name}")
        self._view = StoreView(self.uri, self.every)
        self._seen = self._struck = self._began = self._view.look()
        self._tick = threading.Event()
        self._barren = self._wrong = self._ends = 0
        self._phase: Phase = "imports"
        self._excused: set[int] = set()
        self._finished = False

    def run(self) -> None:
        """Strike with all faults, then let it finish. Look at `problems` afterwards."""
        try:
            self._start()
            for fault in self.faults:
                if not self._finished:
                    self._meet(fault)
            while not self._finished:
                self._until(lambda: False)
            self._look_for_leftovers()
        except Stuck as stuck:
            self.problems.append(str(stuck))
        finally:
            self._processes.kill()
            self._command.wait()
            if not self.problems:
                shutil.rmtree(self._folder)

    def story(self) -> str:
        """All there is to know about a failure."""
        kept = [f"what was shown, and Ray's logs: {self._folder}"] if self.problems else []
        return "\n".join([f"run {self.name}", *(told(entry) for entry in self.log), *self.problems, *kept])

    def _meet(self, fault: Fault) -> None:
        """Await the fault's moment, and strike."""
        if self._barren >= BARREN:
            committed = self._seen.committed
            self._until(lambda: self._seen.committed > committed)
        if self._too_late_for(fault.phase):
            self._until(lambda: self._trains() and self._seen.done >= fault.step)
            self._restart()
        while not self._finished:
            target = None
            if fault.phase in _BRIEF:  # looking for it takes longer than a save
                self._until(self._trains)
                target = self._target(fault)
            self._until(lambda: self._has_come(fault), _BRIEF_S if fault.phase in _BRIEF else _TICK_S)
            self._tick.wait(fault.delay)
            if self._command.poll() is None:
                self._strike(fault, target)
                return  # else the fault before was quicker: with the next command, then

    def _too_late_for(self, phase: Phase) -> bool:
        """The present command is past its beginning."""
        old = phase == "imports" and time.monotonic() - self._started > IMPORTS_S
        return old or (phase in STARTS and self._seen.newest != self._began.newest)

    def _restart(self) -> None:
        """A command that is to be struck at its beginning has to begin: the one before makes room."""
        before = len(self._processes.commands)
        if not self._finished:
            self._phase = "steps"
            self._do(self._leader, "TERM", Fault("steps", 0, 0, "", (COMMAND,), 0, "TERM", 0))
            self._until(lambda: len(self._processes.commands) > before)

    def _has_come(self, fault: Fault) -> bool:
        seen = self._seen
        match fault.phase:
            case "imports":
                return True
            case "before the first step":
                there = {self._processes.kind(one) for one in self._processes.alive()}
                return fault.stage in there or seen.newest != self._began.newest
            case "steps":
                return self._trains() and seen.done >= fault.step
            case "evaluation":
                return self._trains() and seen.done >= fault.step and seen.evaluates
            case "saving":
                return any(mark.step >= fault.step for mark in seen.unfinished - self._struck.unfinished)
            case "ending":
                return seen.done >= self.steps

    def _trains(self) -> bool:
        """Steps have been made since the last fault, and by this command."""
        return self._seen.newest not in (self._struck.newest, self._began.newest)

    def _until(self, condition: Callable[[], bool], every_s: float = _TICK_S) -> None:
        """Look until `condition` holds or the run is finished; a command that ends is repeated."""
        since = time.monotonic()
        while not self._finished:
            if self._command.poll() is not None:
                self._judge()
                since = time.monotonic()
                continue
            if self._look():
                since = time.monotonic()
            if condition():
                return
            if time.monotonic() - since > STILL_S:
                self._problem(f"gave no sign of life for {STILL_S:g} s")
                raise Stuck(f"stuck; processes:\n{self._processes.tree()}")
            self._tick.wait(every_s)

    def _look(self) -> bool:
        """Whether anything has changed."""
        before, self._seen = self._seen, self._view.look()
        if self._seen.committed > before.committed:
            self._barren = self._wrong = self._ends = 0
        return self._seen != before

    def _strike(self, fault: Fault, target: psutil.Process | None) -> None:
        self._look()
        self._phase = self._present_phase(fault)
        self._barren, self._wrong, self._ends = self._barren + 1, 0, 0
        self._struck = self._seen
        if fault.targets[0] == STORE:
            self._record(fault, STORE, fault.deed, "")
            self._fail_store(fault)
            return
        if target is None or not target.is_running():
            target = self._target(fault)
        if target is not None:
            self._do(target, fault.deed, fault)

    def _target(self, fault: Fault) -> psutil.Process | None:
        if self._finished or fault.targets[0] in (COMMAND, GROUP):
            return self._leader
        alive = self._processes.alive()
        kinds = [self._processes.kind(one) for one in alive]
        kind = next((one for one in fault.targets if one in kinds), None)
        choice = [one for one, its in zip(alive, kinds, strict=True) if kind in (None, its)]
        return choice[int(fault.pick * len(choice))] if choice else None

    def _do(self, process: psutil.Process, deed: str, fault: Fault) -> None:
        kind = GROUP if fault.targets[0] == GROUP else self._processes.kind(process)
        self._record(fault, kind, deed, self._processes.describe(process))
        self._excuse(deed, process)
        if deed == "runs stop":
            self._ask_to_stop()
            return
        signals = ["STOP", "CONT"] if deed == "STOP" else deed.split()
        for number, name in enumerate(signals):
            if number:
                self._tick.wait(fault.seconds if deed == "STOP" else min(fault.seconds, 2.0))
            self._send(process, signal.Signals[f"SIG{name}"], whole=kind == GROUP)

    def _excuse(self, deed: str, process: psutil.Process) -> None:
        """Codes with which the command may end for this fault, beside 75."""
        if process.pid != self._command.pid or not process.is_running():
            return
        if deed == "KILL":
            self._excused.add(-signal.SIGKILL)
        elif deed == "runs stop":
            self._excused.add(STOPPED)
        elif not listens(process) and deed != "STOP":
            self._excused.add(-signal.Signals[f"SIG{deed.split()[0]}"])

    def _send(self, process: psutil.Process, number: signal.Signals, *, whole: bool) -> None:
        try:
            os.killpg(process.pid, number) if whole else process.send_signal(number)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return  # it was quicker

    def _ask_to_stop(self) -> None:
        program = Path(sys.executable).with_name("maskfleet")
        subprocess.run([program, "runs", "stop", self.uri], check=False, capture_output=True, timeout=120)

    def _fail_store(self, fault: Fault) -> None:
        assert self.proxy is not None
        self.proxy.always = next(one for one in OUTAGES if one == fault.deed)
        self._tick.wait(fault.seconds)
        self.proxy.always = None

    def _start(self) -> None:
        environment = {
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "TMPDIR": str(self._folder),
            MARK: self._folder.name,
        }
        if self.proxy is not None:
            environment["AWS_ENDPOINT_URL"] = self.proxy.endpoint
        self._seen = self._began = self._view.look()
        self._shown = self._folder / f"command-{len(self._processes.commands) + 1}.txt"
        with self._shown.open("w") as out:
            self._command = subprocess.Popen(
                [str(Path(sys.executable).with_name("maskfleet")), "train", self.uri],
                env=os.environ | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._leader = psutil.Process(self._command.pid)
        self._processes.commands.append(self._command.pid)
        self._started, self._excused = time.monotonic(), set()

    def _judge(self) -> None:
        """How the command ended; it is repeated unless the run is finished."""
        code, text = self._command.returncode, self._shown.read_text()
        if self.log and self.log[-1]["then"] == WENT_ON:
            self.log[-1]["then"] = code
        self._look()
        self._finished = code == 0
        wrong = []
        if code not in {0, REPEAT, *self._excused}:
            wrong.append(f"ended with {code}")
        if self._finished and self._seen.committed < self.steps:
            wrong.append(f"ended with 0 at step {self._seen.committed}")
        if "Traceback" in text and not self._excused - {-signal.SIGKILL, STOPPED}:
            wrong.append("showed a traceback")
        if wrong:
            self._problem(" and ".join(wrong))
        if not self._finished:
            self._ensure_progress(wrong=bool(wrong))
            self._start()

    def _ensure_progress(self, *, wrong: bool) -> None:
        """Raises Stuck: ends again and again, without a commit or a fault."""
        self._wrong, self._ends = self._wrong + wrong, self._ends + 1
        if self._wrong > WRONG or self._ends > ENDS:
            raise Stuck(f"given up: {self._ends} ends without a commit or a fault, {self._wrong} of them wrong")

    def _problem(self, what: str) -> None:
        number = len(self._processes.commands)
        lines = self._shown.read_text().splitlines()
        shown = "\n".join(f"    | {line[:300]}" for line in [*lines[:5], "..", *lines[-25:]][: len(lines) or 1])
        struck = [f"    {told(entry)}" for entry in self.log if entry["command"] == number]
        self.problems.append("\n".join([f"PROBLEM: command {number} {what}, after", *struck, shown]))

    def _look_for_leftovers(self) -> None:
        left = self._processes.await_end(LEFT_S)
        if left:
            self.problems.append("PROBLEM: processes left behind:\n" + "\n".join(left))
        scratch = sorted(path.name for path in self._folder.glob("maskfleet-*"))
        if scratch:  # Ray's own folder of sessions and logs, `ray`, may stay
            self.problems.append(f"PROBLEM: scratch left behind: {', '.join(scratch)}")

    def _record(self, fault: Fault, kind: str, deed: str, whom: str) -> None:
        entry = {
            "run": self.name,
            "command": len(self._processes.commands),
            "at": round(time.monotonic() - self._started, 2),
            "phase": self._phase,
            "kind": kind,
            "deed": deed,
            "step": self._seen.done,
            "whom": whom,
            "then": WENT_ON,
        }
        self.log.append(entry | {"planned": asdict(fault)})

    def _present_phase(self, fault: Fault) -> Phase:
        """The fault's, unless that is over."""
        short = fault.phase in _BRIEF and not self._has_come(fault)
        late = fault.phase == "before the first step" and self._seen.newest != self._began.newest
        return "steps" if short or late else fault.phase


class Stuck(Exception):
    """The run cannot be brought to its end."""


def told(entry: dict[str, Any]) -> str:
    """An entry of the log for people."""
    seconds = f" {entry['planned']['seconds']:.1f} s" if entry["deed"] not in ("KILL", "TERM", "HUP", "INT") else ""
    when = f"command {entry['command']}, {entry['at']:.1f} s, {entry['phase']}, {entry['step']} steps"
    return f"{when}: {entry['deed']}{seconds} to {entry['kind']} ({entry['whom']}): {entry['then']}"


def write_log(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    with path.open("a") as lines:
        lines.writelines(json.dumps(entry) + "\n" for entry in entries)
