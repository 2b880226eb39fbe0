"""The command's processes: whatever dies, and whatever signal comes, the code is one of four and nothing is left."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launcher.exit_codes import REPEAT
from tests.support.runs.observer import listens

MARK = "TEST_OF_COMMAND"

# A driver with a child, a grandchild in a session of its own, and what the test wants it to do.
PROGRAM = """
import os, signal, subprocess, sys, time
from launcher import command
from launcher.maskfleet import __main__ as console

def work():
    wait = "import time; time.sleep(600)"
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {wait!r}], start_new_session=True)"
    subprocess.Popen([sys.executable, "-c", wait], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", orphan]).wait()
    print("ready", flush=True)
    DOES

command._DRIVER_END_TIMEOUT_S = command._SECOND_SIGNAL_TIMEOUT_S = 0.5
sys.argv[1:] = ["train", "somewhere"]
console._run_cli = work
console.main()
"""
WAITS = "time.sleep(600)"
SAVING_COMMANDS = """
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    signal.signal(signal.SIGHUP, lambda *_: asked.append(1))
    with command.mark_saving():
        print("listening", flush=True)
        while not asked:
            time.sleep(0.01)
        time.sleep(1.5)
    sys.exit(75)
"""


LOSES_A_SIGNAL = (
    """
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    print("starting Ray", flush=True)
    while not heard:
        time.sleep(0.01)
"""
    + SAVING_COMMANDS
)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """In the environment of whatever a test starts; what is left at its end is ended."""
    name = str(tmp_path)
    yield name
    for process in alive(name):
        with suppress(psutil.NoSuchProcess):  # it ended by itself meanwhile
            process.kill()


def start(does: str, mark: str, *prefix: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", PROGRAM.replace("DOES", does)],
        env=os.environ | {MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )


def until(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == line


def alive(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    text, _ = process.communicate(timeout=30)
    return process.returncode, text


@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("pass", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3), ("sys.exit(2)", 2), ("sys.exit(75)", 75),
        ("sys.exit(1)", 75), ("sys.exit('no')", 2), ("1 / 0", 75), ("os.abort()", 75), ("os._exit(7)", 75),
        ("os.kill(os.getpid(), signal.SIGKILL)", 75), ("raise KeyboardInterrupt", 75),
    ],
)  # fmt: skip
def test_every_end_of_the_driver_is_one_of_four(does: str, code: int, mark: str) -> None:
    found, text = ended(start(does, mark))
    assert (found, alive(mark)) == (code, [])
    assert "Traceback" not in text


@pytest.mark.long
def test_a_signal_to_the_group_lets_the_driver_save(mark: str) -> None:
    process = start(SAVING_COMMANDS, mark)
    until(process, "ready")
    until(process, "listening")
    os.killpg(process.pid, random.choice([signal.SIGTERM, signal.SIGHUP]))
    assert (ended(process)[0], alive(mark)) == (75, [])


def test_a_signal_that_was_lost_before_ranks_train_comes_again(mark: str) -> None:
    """While Ray starts, its own handler answers: Python discards the SystemExit if a callback of a fork runs."""
    process = start(LOSES_A_SIGNAL, mark)
    until(process, "ready")
    until(process, "starting Ray")
    process.terminate()
    until(process, "listening")
    assert (ended(process)[0], alive(mark)) == (75, [])


def test_a_driver_that_has_nothing_to_save_is_given_a_little_time_only(mark: str) -> None:
    """It may hang in somebody's code, and hear of no signal."""
    process = start("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); " + WAITS, mark)
    until(process, "ready")
    began = time.monotonic()
    process.terminate()
    code, text = ended(process)
    assert (code, alive(mark)) == (75, [])
    assert time.monotonic() - began < 10
    assert re.search(r"\bsame command\b.*\bno step\b", text)


@pytest.mark.long
def test_a_second_ctrl_c_does_not_wait(mark: str) -> None:
    process = start(
        "signal.signal(signal.SIGINT, signal.SIG_IGN); " + SAVING_COMMANDS.strip().replace("\n    ", "\n    "),
        mark,
    )
    until(process, "ready")
    until(process, "listening")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # two signals in one moment are one
    code, text = ended(process)
    assert (code, alive(mark)) == (75, [])
    assert re.search(r"\blast checkpoint\b.*\blost\b", text)


@pytest.mark.long
def test_what_a_killed_command_leaves_is_ended_by_the_next(mark: str) -> None:
    process = start(WAITS, mark)
    until(process, "ready")
    process.kill()
    process.wait()
    while len(alive(mark)) > 2:  # the driver dies with its parent; nobody is there to end its children
        time.sleep(0.01)
    assert ended(start("pass", mark))[0] == 0
    assert alive(mark) == []


ELSEWHERE = ("unshare", "--pid", "--fork", "--kill-child")  # a container's processes, which the machine sees
needs_namespaces = pytest.mark.skipif(
    subprocess.run([*ELSEWHERE, "true"], capture_output=True).returncode != 0,
    reason="no right to make PID namespaces",
)


@pytest.mark.long
@needs_namespaces
@pytest.mark.parametrize("inside", [(), ("unshare", "--mount-proc")], ids=["our /proc", "its own /proc"])
def test_a_command_in_another_container_is_left_alone(mark: str, inside: tuple[str, ...], tmp_path: Path) -> None:
    """Seen from outside, its processes have other numbers than they know; seen from inside, ours have none."""
    process = start(WAITS, mark, *ELSEWHERE, *inside)
    until(process, "ready")
    there = {one.pid for one in alive(mark)}
    assert len(there) > 3
    here = f"{tmp_path}-here"
    assert ended(start("pass", here))[0] == 0
    assert {one.pid for one in alive(mark)} == there
    mine = start(WAITS, here)
    until(mine, "ready")
    ours = {one.pid for one in alive(here)}
    assert ended(start("pass", f"{tmp_path}-inside", *ELSEWHERE, *inside))[0] == 0
    assert {one.pid for one in alive(here)} == ours
    for one in (mine, process):
        one.kill()
        one.wait()


AGENT = """
import sys, time
from ray._raylet import setproctitle
log = open(sys.argv[1], "a")
setproctitle("ray::DashboardAgent")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.parametrize("ours", [False, True])
def test_only_agents_of_our_own_rays_are_ended(mark: str, tmp_path: Path, ours: bool) -> None:
    """Ray's two agents outlive a raylet that is killed with its driver, even while Ray starts. Their environment cannot
    be read."""
    logs = tmp_path / "ray" / "session_2026-11-30_99999999" / "logs"
    logs.mkdir(parents=True)
    if ours:  # the command was killed while or after it started this Ray
        (tmp_path / "maskfleet-ray-99999999").touch()
    shell = ["sh", "-c", 'exec "$@" & ', "sh"]  # its session's leader is gone at once, as a killed driver is
    started = subprocess.Popen(
        [*shell, sys.executable, "-c", AGENT, str(logs / "agent.log")],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    started.wait()
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    found = [one for one in psutil.process_iter() if str(tmp_path) in str(files_of(one))]
    assert len(found) == 1
    assert ended(start("pass", mark))[0] == 0
    _, left = psutil.wait_procs(found, timeout=0 if not ours else 10)
    assert bool(left) != ours
    for one in left:
        one.kill()


def files_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error, OSError):
        if process.name() != "zombie":
            return [file.path for file in process.open_files()]
    return []


@pytest.mark.long
def test_a_closed_terminal_does_not_end_the_driver(mark: str) -> None:
    process = start("time.sleep(0.3); print('x' * 100000); print('y', flush=True); sys.exit(3)", mark)
    until(process, "ready")
    assert process.stdout is not None
    process.stdout.close()
    assert (process.wait(30), alive(mark)) == (3, [])


@pytest.mark.long
def test_a_command_that_was_stopped_for_a_while_goes_on(mark: str) -> None:
    process = start("time.sleep(2); sys.exit(3)", mark)
    until(process, "ready")
    for _ in range(5):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    assert (ended(process)[0], alive(mark)) == (3, [])


@pytest.mark.long
def test_what_is_ignored_at_the_start_stays_so(mark: str) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("time.sleep(1.5); sys.exit(3)", mark)
    finally:
        signal.signal(signal.SIGHUP, before)
    until(process, "ready")
    os.killpg(process.pid, signal.SIGHUP)
    assert (ended(process)[0], alive(mark)) == (3, [])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_any_signal_at_any_moment(seed: int, mark: str) -> None:
    """From the moment on at which the command has begun to listen, which takes it some hundredths of a second."""
    draw = random.Random(seed)
    process = start(draw.choice([WAITS, SAVING_COMMANDS, "time.sleep(0.2)"]), mark)
    while not listens(psutil.Process(process.pid)):
        assert process.poll() is None
    time.sleep(draw.uniform(0, 0.8))
    for _ in range(draw.randint(1, 3)):
        numbers = draw.choice([[signal.SIGTERM], [signal.SIGINT], [signal.SIGHUP], [signal.SIGSTOP, signal.SIGCONT]])
        send = draw.choice([os.kill, os.killpg])
        for number in numbers:
            with suppress(ProcessLookupError):
                send(process.pid, number)
        time.sleep(draw.uniform(0, 0.1))
    code, text = ended(process)
    assert code in (0, REPEAT)
    assert (alive(mark), "Traceback" in text) == ([], False)
