"""The `maskfleet` command as processes: training runs in a child, whose crash cannot kill the command.

    maskfleet train RUN        the parent: imports next to nothing, passes signals on, waits, and cleans up
      +- the driver            a session of its own, so that a signal to the command's group reaches the parent only
           +- Ray's processes, where there is no cluster: ranks, data workers, ...

Whatever ends the driver (a signal, a crash of Ray inside it, our own mistake), the parent's exit code is one of
`launcher.exit_codes`, and nothing of the tree is left: the parent is the reaper of all its descendants, and every
process has the parent's name in its environment, by which a later start finds what a killed parent left.
"""

import ctypes
import logging
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from data_service import processes
from launcher.exit_codes import EXIT_CODES, FINISHED, MISTAKE, REPEAT
from launcher.output import StreamProxy
from launcher.progress import clear_before_write
from launcher.signals import handled_signals

if TYPE_CHECKING:
    import psutil  # imported where it is used: it is slow to import

_TRAINING_COMMANDS = ("train", "demo")
COMMANDS_WITH_SIGNAL_HANDLERS = (*_TRAINING_COMMANDS, "evaluate")
_CORPUS_COMMANDS = ("build", "prepare", "append")  # commands of `corpus` that start a Ray
_RAY_AGENT_NAMES = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
_DRIVER_END_TIMEOUT_S = 15.0  # time limit for a driver that has nothing to save to end by itself
_SECOND_SIGNAL_TIMEOUT_S = 3.0  # time limit for the driver to end after a second Ctrl-C
_KILL_TIMEOUT_S = 10.0  # time limit for killed processes to be gone
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # options of prctl(2)

_save_flags = mmap.mmap(-1, 2)  # flags shared with the driver: whether it is saving, and whether it ever was


def needs_supervision(arguments: Sequence[str]) -> bool:
    """Return whether the command starts a Ray, so that its process tree is looked after."""
    if {"-h", "--help"} & set(arguments):
        return False
    match arguments:
        case ["corpus", name, *_]:
            return name in _CORPUS_COMMANDS
        case [name, *_]:
            return name in COMMANDS_WITH_SIGNAL_HANDLERS
    return False


def run_supervised(driver_function: Callable[[], None]) -> int:
    """Run `driver_function` in a child process, the driver. Return the exit code of the command."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    os.environ.pop(processes.COMMAND_VARIABLE, None)  # removes the value that an outer command has set
    name = processes.command_name()
    _end_orphans()
    os.environ[processes.COMMAND_VARIABLE] = name
    try:
        parent, driver = os.getpid(), os.fork()
        if driver == 0:
            _run_as_driver(driver_function, parent)
        return _exit_code(*_wait_for_driver(driver))
    finally:
        _kill_command_processes(name)
        processes.remove_ray_sessions(name)


def supervisor_pid() -> int:
    """Return the pid of the command's parent process, which receives signals and whose death ends the command."""
    return int(processes.command_name().partition("-")[0])


@contextmanager
def mark_saving() -> Iterator[None]:
    """Give the driver time to save after a request to end, inside the `with` block."""
    _save_flags[0] = _save_flags[1] = 1
    try:
        yield
    finally:
        _save_flags[0] = 0


@contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """Redirect this process's standard output and error to a file inside the `with` block, because libraries, above all
    Ray's core, print much that we tell operators in our own words. An `open_terminal_stream()` that was opened before
    still writes to the screen."""
    kept, file = [os.dup(1), os.dup(2)], os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    logged = logging.StreamHandler()
    logging.getLogger().addHandler(logged)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(logged)
        for number, before in zip((1, 2), kept, strict=True):
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(before, number)
            os.close(before)


def open_terminal_stream(descriptor: int = 1) -> IO[str]:
    """Return a stream to the original standard output (2: error). It works while that is redirected
    (`redirect_output`), and drops the text if the terminal is gone."""
    stream: IO[str] = _CloseTolerantStream(os.fdopen(os.dup(descriptor), "w", buffering=1))  # type: ignore[assignment]
    return stream


def _run_as_driver(driver_function: Callable[[], None], parent_pid: int) -> None:
    """Run `driver_function` as the driver, and never return. The process ends with its `parent_pid`, since nobody
    else watches it."""
    code = REPEAT
    try:
        os.setsid()
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # the parent died before prctl took effect
            os._exit(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*handled_signals(), signal.SIGCHLD})
        # These commands go on after their terminal has closed.
        if sys.argv[1] in COMMANDS_WITH_SIGNAL_HANDLERS:
            sys.stdout, sys.stderr = _CloseTolerantStream(sys.stdout), _CloseTolerantStream(sys.stderr)
        logging.getLogger().addHandler(logging.NullHandler())  # messages for people have their own channel
        driver_function()
        code = FINISHED
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else MISTAKE if end.code else FINISHED
    except KeyboardInterrupt:
        pass  # Ctrl-C came before a handler was installed, so nothing was done
    except BaseException as error:
        _print_error(f"the command failed: {type(error).__name__}: {error}")
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # skips exit handlers; the parent kills the rest


def _wait_for_driver(driver_pid: int) -> tuple[int, bool]:
    """Pass signals on until the driver has ended. Return its wait status, and whether it was asked to end.

    A driver that is saving gets all the time it needs; another gets a short time and is then killed.
    """
    stop_requested, interrupts, idle_since, asking = False, 0, 0.0, handled_signals()
    may_be_lost = False  # while Ray starts, its handler answers by SystemExit, which Python discards in a callback
    while True:
        found, status = os.waitpid(driver_pid, os.WNOHANG)
        if found:
            return status, stop_requested
        if may_be_lost and _save_flags[0]:
            may_be_lost = False
            os.kill(driver_pid, signal.SIGTERM)
        patience = _SECOND_SIGNAL_TIMEOUT_S if interrupts > 1 else _DRIVER_END_TIMEOUT_S
        if not stop_requested or (_save_flags[0] and interrupts < 2):
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > patience:
            os.kill(driver_pid, signal.SIGKILL)
        heard = signal.sigtimedwait({*asking, signal.SIGCHLD}, 0.5)
        if heard is None or heard.si_signo not in asking:  # after SIGCONT the signal number is missing
            _reap_orphans(driver_pid)
            continue
        stop_requested, may_be_lost = True, not _save_flags[0]
        interrupts += heard.si_signo == signal.SIGINT
        os.kill(driver_pid, heard.si_signo)  # the driver is not reaped yet, so its pid is valid


def _exit_code(wait_status: int, stop_requested: bool) -> int:
    """Return the command's exit code. Prints what happened if the driver could not."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code in EXIT_CODES:
        return code
    if not stop_requested:
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        checkpoint_note = "; the run stands at its last checkpoint" if sys.argv[1] in _TRAINING_COMMANDS else ""
        _print_error(f"the process that did the work {how}{checkpoint_note}")
    if sys.argv[1] not in _TRAINING_COMMANDS:
        _print_error("the same command goes on: what is stored stays")
        return REPEAT
    lost = "; what was done since the last checkpoint is lost" if _save_flags[1] else ": no step was made"
    _print_error(f"the same command goes on{lost}")
    return REPEAT


def _print_error(text: str) -> None:
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _reap_orphans(driver_pid: int) -> None:
    """Reap the dead descendants whose parents had ended before them."""
    dead = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (found := os.waitid(os.P_ALL, 0, dead)) is not None and found.si_pid != driver_pid:
        os.waitpid(found.si_pid, 0)


def _kill_command_processes(command_name: str) -> None:
    import psutil

    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        named = (process for process, owner in _command_processes() if owner == command_name)
        left = {*psutil.Process().children(recursive=True), *named}
        for process in left:
            _kill_process(process)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return
        time.sleep(0.02)  # they are dying, and no event tells when the last one is gone


def _kill_process(process: "psutil.Process") -> None:
    import psutil

    with suppress(psutil.Error):
        process.kill()


def _end_orphans() -> None:
    """End processes that earlier commands of this container left behind, and whose parents were killed."""
    import psutil

    for process, owner in _command_processes():
        if not processes.may_process_exist(owner):
            _kill_process(process)
    for process in psutil.process_iter():
        if _is_orphaned_agent(process):
            _kill_process(process)
    processes.remove_ray_sessions()


def _is_orphaned_agent(process: "psutil.Process") -> bool:
    """Return whether the process is an agent of Ray that outlived its raylet and driver, and a command of ours
    started that Ray. An agent's title overwrites its environment, so it is recognised by the folder of its log."""
    import psutil

    with suppress(psutil.Error, OSError):
        if process.uids().real != os.getuid() or process.cmdline()[:1] not in ([name] for name in _RAY_AGENT_NAMES):
            return False
        parent = process.parent()
        if processes.process_start_ticks(os.getsid(process.pid)) or (parent is not None and parent.name() == "raylet"):
            return False
        folders = {Path(file.path).parent for file in process.open_files()}
        return any((folder / processes.RAY_SESSION_MARK).exists() for folder in folders)
    return False


def _command_processes() -> Iterator[tuple["psutil.Process", str]]:
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error):
            owner = process.environ().get(processes.COMMAND_VARIABLE)
            if owner is not None and process.pid != os.getpid():
                yield process, owner


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class _CloseTolerantStream(StreamProxy):
    """A stream that drops the text after its terminal was closed or its reader has ended."""

    def write(self, text: str) -> int:
        clear_before_write(text)
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()
