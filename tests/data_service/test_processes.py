"""A temporary folder and a lock last as long as their process, and no longer, however that ends."""

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from data_service.processes import temporary_folder

PROGRAM = """
import time
from data_service.processes import temporary_folder
with temporary_folder("one") as folder:
    (folder / "file").write_text("text")
    print(folder, flush=True)
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_gone_with_its_context_and_with_an_error(temporary: Path) -> None:
    def fails() -> None:
        with temporary_folder("one") as folder, temporary_folder("two"):
            assert len(list(temporary.iterdir())) == 2
            (folder / "in").mkdir()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("draw", [0, *(pytest.param(draw, marks=pytest.mark.long) for draw in range(1, 6))])
def test_of_many_processes_those_of_the_killed_go_with_the_next(temporary: Path, draw: int) -> None:
    """What is kept, and what others put there, stays."""
    draws = random.Random(draw)
    kept = temporary / "maskfleet-finetuned-x"
    kept.mkdir()
    (temporary / "maskfleet-temporary-link").symlink_to(kept)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        folders = [Path(process.stdout.readline().strip()) for process in processes if process.stdout]
        dead = draws.sample(range(4), 2)
        for number in dead:
            processes[number].send_signal(signal.SIGKILL)
            processes[number].wait()
        assert all(folder.exists() for folder in folders)
        with temporary_folder("next"):
            assert [folder.exists() for folder in folders] == [number not in dead for number in range(4)]
        assert kept.is_dir()
    finally:
        for process in processes:
            process.kill()
            process.wait()
