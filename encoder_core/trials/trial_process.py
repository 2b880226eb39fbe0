"""A trial in a separate process: what is tried may raise an error, hang, or end its process, and the run continues.

`run_trial_process` starts a function of ours in a fresh interpreter and yields its reports, as dictionaries. The
process has its own session, so it is killed together with all that it started. The kernel kills it when its parent
dies. When memory runs out, the kernel kills it before a rank. Its output is discarded, except the last words of a
process that ended too early.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Report = dict[str, Any]
_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl(2)
_TICK_S = 0.5
_EXIT_WAIT_S = 2.0
_CHUNK_BYTES = 1 << 16
_QUOTED_CHARACTERS = 300  # characters at the end of a process's output that an error quotes
_MAX_LINE_BYTES = 1 << 20  # bytes of the longest line of a report
_FINISHED_MESSAGE = {"finished": True}
_CHILD_PROGRAM = "import sys\nfrom encoder_core.trials.trial_process import run_trial\nrun_trial(*sys.argv[1:])"


class TrialEnded(Exception):
    """The process ended before it had finished, or was killed; the text says how."""


def error_text(error: BaseException) -> str:
    """Return an error as text that fits into a record, even if the error cannot be converted to a string."""
    try:
        text = str(error)
    except BaseException:
        text = "an error that cannot be shown"
    return f"{type(error).__name__}: {text}".encode("utf-8", "replace").decode()


@dataclass
class Deadline:
    """How long a process may continue without a report; the caller of `run_trial_process` may change it at each
    report."""

    seconds: float


@dataclass
class _Child:
    """A process, and our ends of its pipes."""

    process: "subprocess.Popen[bytes]"
    orders: int
    reports: int
    output: int
    rest: bytes = b""
    words: bytes = b""
    open: set[int] = field(default_factory=set)


def run_trial_process(
    target: str, request: Mapping[str, Any], deadline: Deadline, tick: Callable[[], None]
) -> Generator[Report]:
    """Yield the reports of `target` ("module:function"), which is called as `function(request, line)` with its
    `TrialConnection`.

    `request` and reports are JSON. `tick` is called about twice a second. The process waits after each report until
    it is taken. When the iterator ends or is closed, nothing of the process is left, and its memory is free.

    Raises:
        TrialEnded: the process ended before it had finished, or exceeded the deadline.
    """
    child = _start(target, request)
    try:
        yield from _receive_reports(child, deadline, tick)
    finally:
        _kill_child(child)


def _start(target: str, request: Mapping[str, Any]) -> _Child:
    (orders_in, orders), (reports, reports_out), (output, output_in) = os.pipe(), os.pipe(), os.pipe()
    inherited = (orders_in, reports_out)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD_PROGRAM, target, str(os.getpid()), *map(str, inherited)],
            stdin=subprocess.DEVNULL,
            stdout=output_in,
            stderr=output_in,
            pass_fds=inherited,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
    except BaseException:
        for end in (orders, reports, output):
            os.close(end)
        raise
    finally:
        for end in (*inherited, output_in):
            os.close(end)
    child = _Child(process, orders, reports, output, open={reports, output})
    for end in child.open:
        os.set_blocking(end, False)
    _send_line(child, json.dumps(request))
    return child


def _send_line(child: _Child, line: str) -> None:
    with suppress(BrokenPipeError):  # the reader of its reports notices that the process has ended
        os.write(child.orders, line.encode() + b"\n")


def _receive_reports(child: _Child, deadline: Deadline, tick: Callable[[], None]) -> Iterator[Report]:
    heard = time.monotonic()
    while True:
        ended, closed = _has_ended(child), child.reports not in child.open
        _read_pipes(child, 0.0 if ended else _EXIT_WAIT_S / 100 if closed else _TICK_S)
        for report in _parse_reports(child):
            if report == _FINISHED_MESSAGE:
                return
            yield report
            _send_line(child, "")
            heard = time.monotonic()
        if not closed and child.reports not in child.open:
            heard = time.monotonic()
        if ended:
            raise TrialEnded(_ending_text(child))
        # A process that ends closes the pipe a little before.
        if closed and time.monotonic() > heard + _EXIT_WAIT_S:
            raise TrialEnded("its process closed the pipe through which it reports")
        if time.monotonic() > heard + deadline.seconds:
            raise TrialEnded(f"it was not done after {deadline.seconds:.0f} s")
        tick()


def _has_ended(child: _Child) -> bool:
    """Return whether the process has ended. It is not reaped, so that no other process or group can get its number."""
    return _exit_status(child, os.WNOHANG) is not None


def _exit_status(child: _Child, options: int = 0) -> "os.waitid_result | None":
    try:
        return os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT | options)
    except ChildProcessError:  # another thread has reaped the child, whose exit code is lost
        return os.waitid_result((child.process.pid, 0, signal.SIGCHLD, 0, os.CLD_EXITED))


def _read_pipes(child: _Child, patience_s: float) -> None:
    """Read all that is available; wait for it if there is nothing."""
    with selectors.DefaultSelector() as selector:
        for end in child.open:
            selector.register(end, selectors.EVENT_READ)
        for key, _ in selector.select(patience_s):
            _read_pipe(child, key.fd)


def _read_pipe(child: _Child, end: int) -> None:
    """Read one pipe. A process that has ended may have left as much as a pipe holds."""
    with suppress(BlockingIOError):
        for _ in range(16):
            read = os.read(end, _CHUNK_BYTES)
            if not read:
                child.open.discard(end)
                return
            if end == child.output:
                child.words = (child.words + read)[-4 * _QUOTED_CHARACTERS :]
            else:
                child.rest += read


def _parse_reports(child: _Child) -> Iterator[Report]:
    *lines, child.rest = child.rest.split(b"\n")
    if len(child.rest) > _MAX_LINE_BYTES:
        raise TrialEnded("its process wrote something else into the pipe through which it sends reports")
    for line in lines:
        try:
            report = json.loads(line)
        except ValueError:
            report = None
        if not isinstance(report, dict):
            raise TrialEnded("its process wrote something else into the pipe through which it sends reports")
        yield report


def _ending_text(child: _Child) -> str:
    status = _exit_status(child)
    assert status is not None
    code = status.si_status
    how = f"ended with exit code {code}" if status.si_code == os.CLD_EXITED else f"killed by {_signal_name(code)}"
    words = child.words.decode("utf-8", "replace").strip()[-_QUOTED_CHARACTERS:]
    return f"its process was {how}: {words}" if how.startswith("killed") else f"its process {how}: {words}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kill_child(child: _Child) -> None:
    """Kill the process group. The leader is reaped only afterwards, so that the group's number still belongs to it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.kill()
    child.process.wait()
    for end in (child.orders, child.reports, child.output):
        os.close(end)


class TrialConnection:
    """The other end of `run_trial_process`, in the process of the trial."""

    def __init__(self, orders: int, reports: int) -> None:
        self._orders = os.fdopen(orders, "rb")
        self._reports = reports

    def read_request(self) -> Report:
        read: Report = json.loads(self._orders.readline())
        return read

    def report(self, **what: Any) -> None:
        """Send a report and return once it is taken; end the process if the reader is gone."""
        self._write(what)
        if not self._orders.readline():
            os._exit(1)

    def finish(self) -> None:
        self._write(_FINISHED_MESSAGE)
        os._exit(0)  # does not wait for threads and exit handlers that the trial left

    def _write(self, what: Report) -> None:
        left = json.dumps(what).encode() + b"\n"
        while left:
            left = left[os.write(self._reports, left) :]


def run_trial(target: str, parent: str, orders: str, reports: str) -> None:
    """Run the process of a trial. Never returns."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before the line above
        os._exit(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    line = TrialConnection(int(orders), int(reports))
    module, _, name = target.partition(":")
    __import__(module)
    getattr(sys.modules[module], name)(line.read_request(), line)
    line.finish()
