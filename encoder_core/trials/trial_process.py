"""Runs a trial in a separate process, so that the run continues if the trial raises an error, hangs, or crashes.

`run_trial_process` starts a function of ours in a new Python interpreter, and yields its reports as dictionaries. The
process has its own session, so it is killed together with all processes that it started. Linux kills it when its parent
dies and, if memory runs out, before any rank. Its output is discarded, except the end of the output of a process that
ended too early.
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

Report = dict[str, Any]  # a report of the trial's process, or the request to it, as JSON
_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl(2)
_TICK_S = 0.5  # largest time between two calls of `tick`, in seconds
_EXIT_WAIT_S = 2.0  # seconds that a process has to exit after closing its report pipe
_CHUNK_BYTES = 1 << 16  # bytes that are read from a pipe at a time
_QUOTED_CHARACTERS = 300  # number of characters of the end of a process's output that an error quotes
_MAX_LINE_BYTES = 1 << 20  # largest size of a report's line
_FINISHED_MESSAGE = {"finished": True}  # last report of a process whose function has returned
_CHILD_PROGRAM = "import sys\nfrom encoder_core.trials.trial_process import run_trial\nrun_trial(*sys.argv[1:])"


class TrialEnded(Exception):
    """The trial's process ended before it had finished, or was killed; the text says how."""


def error_text(error: BaseException) -> str:
    """Return an error as text that fits into a record, even if the error cannot be converted to a string."""
    try:
        text = str(error)
    except BaseException:
        text = "an error that cannot be shown"
    return f"{type(error).__name__}: {text}".encode("utf-8", "replace").decode()


@dataclass
class Deadline:
    """The time, in seconds, that a process may take until its next report. The caller of `run_trial_process` may change
    it after each report."""

    seconds: float


@dataclass
class _Child:
    """The trial's process, and the parent's ends of its pipes."""

    process: "subprocess.Popen[bytes]"
    orders: int  # pipe to the process: the request, then an empty line after each report
    reports: int  # pipe from the process: its reports
    output: int  # pipe from the process: its stdout and stderr
    rest: bytes = b""  # beginning of a report that is not yet complete
    words: bytes = b""  # end of the output
    open: set[int] = field(default_factory=set)  # pipes from the process that it has not closed


def run_trial_process(
    target: str, request: Mapping[str, Any], deadline: Deadline, tick: Callable[[], None]
) -> Generator[Report]:
    """Run `target` ("module:function") in a separate process, and yield its reports. The function is called as
    `function(request, line)`, with a `TrialConnection` as `line`.

    `request` and reports are JSON. `tick` is called about twice a second. After each report the process waits until the
    caller asks for the next. When the iterator ends or is closed, the process is killed, and its memory is free.

    Raises:
        TrialEnded: the process ended before it had finished, or exceeded the deadline.
    """
    child = _start(target, request)
    try:
        yield from _receive_reports(child, deadline, tick)
    finally:
        _kill_child(child)


def _start(target: str, request: Mapping[str, Any]) -> _Child:
    """Start the trial's process, and send it the request."""
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
    with suppress(BrokenPipeError):  # `_receive_reports` notices that the process has ended
        os.write(child.orders, line.encode() + b"\n")


def _receive_reports(child: _Child, deadline: Deadline, tick: Callable[[], None]) -> Iterator[Report]:
    """Yield reports until the process has finished; raise TrialEnded if it ends before, or exceeds the deadline."""
    heard = time.monotonic()  # when the current wait began
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
        # An exiting process closes the pipe shortly before it ends, so an error is raised only after a while.
        if closed and time.monotonic() > heard + _EXIT_WAIT_S:
            raise TrialEnded("its process closed its report pipe, but did not exit")
        if time.monotonic() > heard + deadline.seconds:
            raise TrialEnded(f"it was not done after {deadline.seconds:.0f} s")
        tick()


def _has_ended(child: _Child) -> bool:
    """Return whether the process has ended. It is not reaped, so that no other process or group can get its id."""
    return _exit_status(child, os.WNOHANG) is not None


def _exit_status(child: _Child, options: int = 0) -> "os.waitid_result | None":
    try:
        return os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT | options)
    except ChildProcessError:  # another thread has reaped the child, whose exit code is lost
        return os.waitid_result((child.process.pid, 0, signal.SIGCHLD, 0, os.CLD_EXITED))


def _read_pipes(child: _Child, patience_s: float) -> None:
    """Read what the pipes contain; if they are empty, wait up to `patience_s` seconds."""
    with selectors.DefaultSelector() as selector:
        for end in child.open:
            selector.register(end, selectors.EVENT_READ)
        for key, _ in selector.select(patience_s):
            _read_pipe(child, key.fd)


def _read_pipe(child: _Child, end: int) -> None:
    """Read what one pipe contains, up to 1 MiB (Linux's usual limit of a pipe), so that no output of an ended process
    is lost."""
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
    """Yield the reports in the complete lines that were read; raise TrialEnded if a line is not a report."""
    *lines, child.rest = child.rest.split(b"\n")
    if len(child.rest) > _MAX_LINE_BYTES:
        raise TrialEnded("its process wrote something that is not a report into its report pipe")
    for line in lines:
        try:
            report = json.loads(line)
        except ValueError:
            report = None
        if not isinstance(report, dict):
            raise TrialEnded("its process wrote something that is not a report into its report pipe")
        yield report


def _ending_text(child: _Child) -> str:
    """Return how the process ended, with the end of its output."""
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
    """Kill the process group. Its leader is reaped only afterwards, so that the group's id is not reused before."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.kill()
    child.process.wait()
    for end in (child.orders, child.reports, child.output):
        os.close(end)


class TrialConnection:
    """The connection of the trial's process to its parent, which runs `run_trial_process`."""

    def __init__(self, orders: int, reports: int) -> None:
        self._orders = os.fdopen(orders, "rb")
        self._reports = reports

    def read_request(self) -> Report:
        read: Report = json.loads(self._orders.readline())
        return read

    def report(self, **what: Any) -> None:
        """Send a report, and wait until the parent asks for the next. End the process if the parent is gone."""
        self._write(what)
        if not self._orders.readline():
            os._exit(1)

    def finish(self) -> None:
        self._write(_FINISHED_MESSAGE)
        os._exit(0)  # skips threads and exit handlers that the trial may have left

    def _write(self, what: Report) -> None:
        left = json.dumps(what).encode() + b"\n"
        while left:
            left = left[os.write(self._reports, left) :]


def run_trial(target: str, parent: str, orders: str, reports: str) -> None:
    """The main function of the trial's process; never returns."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before prctl was called
        os._exit(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    line = TrialConnection(int(orders), int(reports))
    module, _, name = target.partition(":")
    __import__(module)
    getattr(sys.modules[module], name)(line.read_request(), line)
    line.finish()
