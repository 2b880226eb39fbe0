"""`maskfleet runs watch` as a command: it says where the page is, loads little, and ends quietly."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs.untrained import ToldRun

# As the console script, with what was loaded on standard error at the end of the import of what serves.
_LISTING = """
import sys
from launcher.observe.watch import site
heavy = {"torch", "deepspeed", "ray", "boto3", "transformers", "tokenizers"}
sys.stderr.write(" ".join(heavy & sys.modules.keys()))
sys.argv[0] = "maskfleet"
from launcher.maskfleet.__main__ import main
main()
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _LISTING, "runs", "watch", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_and_ends_quietly(tmp_path: Path, ending: signal.Signals) -> None:
    ToldRun(tmp_path / "run").begin(1)
    process = started(str(tmp_path / "run"), "--port", "0")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.search(rf"^{tmp_path / 'run'} .*http://127\.0\.0\.1:\d", line)
    port = int(line.strip().rstrip("/").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as asking:
        asking.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert asking.recv(15).startswith(b"HTTP/1.0 200")
    process.send_signal(ending)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_folder_of_runs_is_a_mistake(tmp_path: Path) -> None:
    ToldRun(tmp_path / "one").begin(1)
    process = started(str(tmp_path), "--port", "0")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert str(tmp_path / "one") in "".join(err.split())


@pytest.mark.long
def test_what_cannot_be_is_a_mistake(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = started(str(tmp_path), "--port", str(taken.getsockname()[1]))
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert re.search(r"\blisten on 127\.0\.0\.1\b", err)
    assert "--port 0" in err
    assert "Traceback" not in err
