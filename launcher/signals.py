"""Ends a command cleanly on Ctrl-C, SIGTERM or SIGHUP, at any moment.

    Python starts            Python's own handlers: none of our code has run yet
    `maskfleet` is imported  a signal ends the process at once and silently: nothing was begun
    `end_on_signal`          a signal raises an exception that ends the command: temporary files are removed, one line
                             names the signal and says what is kept, and the code is 128 + the signal's number

A command that can be continued has its own code (`signal_response`). `train`, `demo` and `evaluate` have child
processes (`launcher.command`) and save first: `launcher.runtime.cluster.stop_requests` turns their signals into codes.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DEFAULT_END_MESSAGE = "all stored files are complete"  # what is said to be kept when a signal ends the command
# Time limit for Python to run a signal handler, because a library call may last for minutes.
_HANDLER_TIMEOUT_S = 2.0
_CLEANUP_TIMEOUT_S = 30.0  # time limit for removing temporary files and ending the Ray that the command started
_SIGNAL_NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C"}  # names in messages, if not the system's


class _SignalExit(SystemExit):
    """The exception by which a signal ends the command."""


@dataclass
class _SignalResponse:
    """How a signal ends the command, and the signal that has come."""

    code: int | None = None  # exit code; None: 128 + the signal's number
    end_message: str = DEFAULT_END_MESSAGE
    pending_signal: int | None = None  # the signal that is ending the command
    was_discarded: bool = False  # whether the signal's exception was raised where Python discards exceptions

    def print_signal_line(self, number: int) -> int:
        """Print the line about the signal. Return the exit code."""
        name = _SIGNAL_NAMES.get(number) or signal.Signals(number).name
        with suppress(OSError):  # a plain system call, because interrupted code may hold sys.stderr's lock
            os.write(2, f"ended, as {name} asked: {self.end_message}\n".encode())
        return 128 + number if self.code is None else self.code


_current_response = _SignalResponse()  # changed by `signal_response` and by the signal handler


def handled_signals() -> frozenset[signal.Signals]:
    """Return the signals that end the command, without those that were ignored when it was started, as by nohup."""
    return frozenset(number for number in END_SIGNALS if signal.getsignal(number) != signal.SIG_IGN)


def restore_default_handlers() -> None:
    """Set Python's default signal handlers, which the import of `maskfleet` replaced, for a process that handles its
    own signals."""
    for number in handled_signals():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextmanager
def signal_response(code: int, end_message: str) -> Iterator[None]:
    """Set the exit code and the message with which a signal ends the command inside the `with` block."""
    before = _current_response.code, _current_response.end_message
    _current_response.code, _current_response.end_message = code, end_message
    yield
    # No `finally`: an exception that leaves the block ends the command, and the block's code still applies.
    _current_response.code, _current_response.end_message = before


@contextmanager
def end_on_signal() -> Iterator[None]:
    """End the command at the first signal inside the `with` block; a second Ctrl-C ends it without cleaning up.

    If Python cannot handle the signal because a library computes, a thread ends the process.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_reset_signals_in_fork)
    sys.unraisablehook = _keep_discarded_signal
    for number in handled_signals():
        signal.signal(number, _raise_signal_exit)
    threading.Thread(target=_exit_if_handler_stuck, args=(reading,), name="signals", daemon=True).start()
    try:
        yield
    except BaseException:
        if _current_response.pending_signal is None:
            raise
        sys.exit(_current_response.print_signal_line(_current_response.pending_signal))


def _raise_signal_exit(number: int, frame: FrameType | None) -> None:
    if _current_response.pending_signal is None:
        _current_response.pending_signal = number
        raise _SignalExit


def _keep_discarded_signal(unraisable: "sys.UnraisableHookArgs") -> None:
    """Remember a signal whose exception Python discards, because it was raised while an object was finalised."""
    if isinstance(unraisable.exc_value, _SignalExit):
        _current_response.was_discarded = True
    else:
        sys.__unraisablehook__(unraisable)


def _exit_if_handler_stuck(wakeup_fd: int) -> None:
    """End the process after a signal, even if the main thread is stuck. This runs on a separate thread."""
    while True:
        number = os.read(wakeup_fd, 1)[0]
        if signal.getsignal(number) is _raise_signal_exit:
            _await_exit(number, wakeup_fd)


def _await_exit(signal_number: int, wakeup_fd: int) -> None:
    """End the process unless the main thread does so in time. Return if a discarded signal was raised again."""
    waited, interrupts = 0.0, int(signal_number == signal.SIGINT)
    while (
        waited < (_HANDLER_TIMEOUT_S if _current_response.pending_signal is None else _CLEANUP_TIMEOUT_S)
        and interrupts < 2
    ):
        if _current_response.was_discarded:
            _current_response.was_discarded, _current_response.pending_signal = False, None
            signal.raise_signal(signal_number)
            return
        if select.select([wakeup_fd], [], [], 0.1)[0]:
            interrupts += os.read(wakeup_fd, 1)[0] == signal.SIGINT
        else:
            waited += 0.1
    os._exit(_current_response.print_signal_line(signal_number))


def _reset_signals_in_fork() -> None:
    """Reset the handling of signals in a forked process, which is not the command."""
    signal.set_wakeup_fd(-1)
    for number in handled_signals():
        if signal.getsignal(number) is _raise_signal_exit:
            signal.signal(number, signal.SIG_DFL)
