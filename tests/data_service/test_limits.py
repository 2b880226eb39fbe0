"""A command under a limit that it cannot work with names the limit, and what it needs, at once."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.faults.strikes import NOBODY


def limited(limit: str, *command: str, before: tuple[str, ...] = ()) -> tuple[int, str]:
    """Return the exit code and standard error of a command under a limit, in the words of prlimit."""
    done = subprocess.run(
        [*before, "prlimit", f"--{limit}", sys.executable, "-m", "maskfleet", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="prlimit counts this user's other processes")
@pytest.mark.parametrize("threads", [1, 24])
def test_any_command_needs_threads(threads: int) -> None:
    """Libraries in Rust panic without theirs, which would be told as a fault of a file."""
    code, said = limited(f"nproc={threads}", "recipe", "list", before=NOBODY)
    assert code == 2
    [(option, needed)] = re.findall(r"ulimit (-\w) (\d+)", said)
    assert option == "-u"
    code, said = limited(f"nproc={needed}", "recipe", "list", before=NOBODY)
    assert (code, said) == (0, "")
