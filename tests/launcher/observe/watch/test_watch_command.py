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


@pytest.mark.long
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_and_ends_quietly(tmp_path: Path, ending: signal.Signals) -> None:
    ToldRun(tmp_path / "run").begin(1)
    command = [sys.executable, "-c", _LISTING, "runs", "watch", str(tmp_path / "run"), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
