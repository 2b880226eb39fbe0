"""A signal may come between any two instructions of the driver: while it writes a line, while it holds a lock."""

import io
import os
import signal
import threading
from pathlib import Path

import pytest

from launcher.exit_codes import REPEAT
from launcher.runtime.cluster.stop_requests import StopRequests


def _signal_soon(number: int, began: threading.Event) -> threading.Thread:
    def send() -> None:
        began.wait()
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("round_", range(40))
def test_a_signal_in_the_middle_of_a_line_is_a_request_like_any_other(tmp_path: Path, round_: int) -> None:
    number, began = (signal.SIGTERM, signal.SIGHUP)[round_ % 2], threading.Event()
    with (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(tmp_path / "screen", "w")), line_buffering=True) as screen,
        StopRequests(lambda text: print(text, file=screen)) as stopping,
    ):
        sender = _signal_soon(number, began)
        began.set()
        while not stopping.asked.is_set():
            print("a line of the operator's, " * 400, file=screen)
        sender.join()
    assert stopping.reason is not None
    assert (number.name in stopping.reason, stopping.code) == (True, REPEAT)
    assert f"{stopping.reason}: " in (tmp_path / "screen").read_text()


@pytest.mark.parametrize("round_", range(20))
def test_a_signal_while_the_driver_looks_whether_it_was_asked_is_heard(round_: int) -> None:
    """The event's own lock is held then."""
    began = threading.Event()
    with StopRequests(lambda text: None) as stopping:
        sender = _signal_soon(signal.SIGTERM, began)
        began.set()
        while not stopping.asked.wait(1e-6):
            pass
        sender.join()
    assert stopping.reason == "SIGTERM"
