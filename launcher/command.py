"""The `maskfleet` command as processes: training runs in a child, whose crash cannot kill the command.

    maskfleet train RUN        the parent: imports next to nothing, passes signals on, waits, and cleans up
      +- the driver            a session of its own, so that a signal to the command's group reaches the parent only
           +- Ray's processes, where there is no cluster: ranks, data workers, ...

Whatever ends the driver (a signal, a crash of Ray inside it, a bug of ours), the parent's exit code is one of
`launcher.exit_codes`, and no process of the tree is left: the parent reaps all its descendants, and every process has
the command's name in its environment, so that a later command finds the processes of a parent that was killed.
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
    import psutil  # imported only where it is used, because the import is slow

_TRAINING_COMMANDS = ("train", "demo")
COMMANDS_WITH_SIGNAL_HANDLERS = (*_TRAINING_COMMANDS, "evaluate")  # they save before a signal ends them
_CORPUS_COMMANDS = ("build", "prepare", "append")  # subcommands of `corpus` that start Ray
_RAY_AGENT_NAMES = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # processes that may outlive their raylet
_DRIVER_END_TIMEOUT_S = 15.0  # time limit for the end of a driver that has nothing to save
_SECOND_SIGNAL_TIMEOUT_S = 3.0  # time limit for the driver to end after a second Ctrl-C
_KILL_TIMEOUT_S = 10.0  # time limit for the end of killed processes
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # options of prctl(2)

_save_flags = mmap.mmap(-1, 2)  # flags shared with the driver: whether it is saving, and whether it ever was


def needs_supervision(arguments: Sequence[str]) -> bool:
    """Return whether the command starts Ray processes, which a parent process must watch and clean up."""
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
    """Let the driver, while the `with` block runs, take all the time it needs to save after a request to end."""
    _save_flags[0] = _save_flags[1] = 1
    try:
        yield
    finally:
        _save_flags[0] = 0


@contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """Redirect this process's standard output and error to a file inside the `with` block, because libraries, above all
    Ray's core, print much that we report in our own words. A stream that `open_terminal_stream()` opened before still
    writes to the terminal."""
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
    """Return a stream to standard output (`descriptor` 2: standard error) that `redirect_output` does not affect. It
    drops the text if the terminal is gone."""
    stream: IO[str] = _CloseTolerantStream(os.fdopen(os.dup(descriptor), "w", buffering=1))  # type: ignore[assignment]
    return stream


def _run_as_driver(driver_function: Callable[[], None], parent_pid: int) -> None:
    """Run `driver_function` as the driver, and never return. The kernel kills the process if its parent
    `parent_pid` dies."""
    code = REPEAT
    try:
        os.setsid()
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # the parent died before prctl took effect
            os._exit(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*handled_signals(), signal.SIGCHLD})
        # These commands continue after their terminal was closed.
        if sys.argv[1] in COMMANDS_WITH_SIGNAL_HANDLERS:
            sys.stdout, sys.stderr = _CloseTolerantStream(sys.stdout), _CloseTolerantStream(sys.stderr)
        logging.getLogger().addHandler(logging.NullHandler())  # keeps libraries' log messages off standard error
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
        os._exit(code)  # skips exit handlers; the parent kills the remaining processes


def _wait_for_driver(driver_pid: int) -> tuple[int, bool]:
    """Pass signals on until the driver has ended. Return its wait status, and whether it was asked to end.

    After a request to end, a driver gets all the time it needs to save; otherwise it is killed after a short time.
    """
    stop_requested, interrupts, idle_since, asking = False, 0, 0.0, handled_signals()
    may_be_lost = False  # whether the driver may have missed the signal: Python discards a SystemExit in a callback
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
        if heard is None or heard.si_signo not in asking:  # timeout, SIGCHLD, or no signal number after SIGCONT
            _reap_orphans(driver_pid)
            continue
        stop_requested, may_be_lost = True, not _save_flags[0]
        interrupts += heard.si_signo == signal.SIGINT
        os.kill(driver_pid, heard.si_signo)  # the driver is not reaped yet, so its pid is valid


def _exit_code(wait_status: int, stop_requested: bool) -> int:
    """Return the command's exit code. Prints what happened if the driver did not end by itself."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code in EXIT_CODES:
        return code
    if not stop_requested:
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        checkpoint_note = "; the run is at its last checkpoint" if sys.argv[1] in _TRAINING_COMMANDS else ""
        _print_error(f"the command's driver process {how}{checkpoint_note}")
    if sys.argv[1] not in _TRAINING_COMMANDS:
        _print_error("run the same command to continue: stored results are kept")
        return REPEAT
    lost = "; the work since the last checkpoint is lost" if _save_flags[1] else ": no step was done"
    _print_error(f"run the same command to continue{lost}")
    return REPEAT


def _print_error(text: str) -> None:
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _reap_orphans(driver_pid: int) -> None:
    """Reap dead descendants, other than the driver, whose parents ended before them."""
    dead = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (found := os.waitid(os.P_ALL, 0, dead)) is not None and found.si_pid != driver_pid:
        os.waitpid(found.si_pid, 0)


def _kill_command_processes(command_name: str) -> None:
    """Kill this process's descendants and the command's other processes, until none is left or the time is up."""
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
        time.sleep(0.02)  # killed processes need a moment to end, and no event tells when the last one has


def _kill_process(process: "psutil.Process") -> None:
    import psutil

    with suppress(psutil.Error):
        process.kill()


def _end_orphans() -> None:
    """Kill processes that earlier commands in this container left behind because their parents were killed."""
    import psutil

    for process, owner in _command_processes():
        if not processes.may_process_exist(owner):
            _kill_process(process)
    for process in psutil.process_iter():
        if _is_orphaned_agent(process):
            _kill_process(process)
    processes.remove_ray_sessions()


def _is_orphaned_agent(process: "psutil.Process") -> bool:
    """Return whether the process is a Ray agent that one of our commands started, and that outlived its raylet and
    driver. An agent's title overwrites its environment, so it is recognised by the folder of its log."""
    import psutil

    with suppress(psutil.Error, OSError):
        if process.uids().real != os.getuid() or process.cmdline()[:1] not in ([name] for name in _RAY_AGENT_NAMES):
            return False
        parent = process.parent()
        if processes.process_start_ticks(os.getsid(process.pid)) or (parent is not None and parent.name() == "raylet"):
            return False
        folders = {Path(file.path).parent for file in process.open_files()}
        return any(processes.is_recorded_ray_session(folder.parent) for folder in folders if len(folder.parents) > 2)
    return False


def _command_processes() -> Iterator[tuple["psutil.Process", str]]:
    """Yield all other processes of `maskfleet` commands, each with the command's name from its environment."""
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
