"""What follows pretraining is struck at any moment: `finetune`, `embed train` and `evaluate`. The command, or any
process of its tree, gets SIGKILL, SIGTERM or SIGINT, and the same command is given again until it ends well. Its
results are those of one that nobody disturbed; no process is left, and no temporary file.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open

from launcher.exit_codes import REPEAT
from tests.support.models.exports import FAMILIES, export
from tests.support.runs.observer import MARK, Processes
from tests.support.runs.small_runs import new_run
from tests.support.runs.untrained import Committing
from tests.support.tasks.small_tasks import scored, task_files, write_rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

DEEDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOST_STRIKES = 4
LEFT_S = 30.0


@dataclass
class Struck:
    """A command that is struck at random, and given again until it ends well."""

    command: list[str]
    draws: random.Random
    lasts_s: float
    struck: list[str] = field(default_factory=list)

    def run(self, whole: Callable[[], None]) -> None:
        """`whole` looks, after each end, that nothing half-written stands for a result."""
        place = Path(tempfile.mkdtemp(prefix="mf-", dir="/tmp"))  # paths of Ray's sockets must be short
        processes = Processes(f"{MARK}={place.name}")
        try:
            while not self._ended_well(place, processes):
                whole()
            whole()
            assert not processes.await_end(LEFT_S), processes.tree()
            left = sorted(path.name for path in place.glob("maskfleet-*"))
            assert not left, f"{left}, after {self.struck}"
        finally:
            processes.kill()
            shutil.rmtree(place)

    def _ended_well(self, place: Path, processes: Processes) -> bool:
        with (place / "shown.txt").open("w+") as shown:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "maskfleet", *self.command],
                env=os.environ | {"TMPDIR": str(place), "OMP_NUM_THREADS": "1", MARK: place.name},
                stdout=shown,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            processes.commands.append(process.pid)
            asked = self._strike(process, processes) if len(self.struck) < MOST_STRIKES else None
            code = process.wait(900)
            shown.seek(0)
            said = shown.read()
        print(f"{self.command[0]}: {self.struck[-1:]}: ended with {code}")
        assert "Traceback" not in said, (self.struck, said)
        allowed = {0, REPEAT} if asked is None else {0, REPEAT, -asked, 128 + asked}
        assert code in allowed, (self.struck, code, said)
        return code == 0

    def _strike(self, process: "subprocess.Popen[bytes]", processes: Processes) -> signal.Signals | None:
        """Returns what the command itself was sent."""
        try:
            process.wait(self.draws.uniform(0, self.lasts_s * 1.1))
            return None
        except subprocess.TimeoutExpired:
            pass
        deed = self.draws.choice(DEEDS)
        others = [one for one in processes.alive() if one.pid != process.pid]
        whom = (
            self.draws.choice(others) if others and self.draws.random() < 0.5 else psutil.Process(process.pid)
        )
        self.struck.append(f"{deed.name} to {processes.kind(whom)}")
        try:
            whom.send_signal(deed)
        except psutil.NoSuchProcess:
            return None
        return deed if whom.pid == process.pid else None


def undisturbed(command: list[str]) -> float:
    """Seconds that it takes."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "maskfleet", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return time.monotonic() - began


def weights(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def ensure_loads_or_is_no_model(folder: Path) -> None:
    """A loader looks for config.json first, which is written last."""
    if (folder / "config.json").is_file():
        for path in folder.rglob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                assert list(file.keys())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a task and pairs of sentences."""
    folder = tmp_path_factory.mktemp("after")
    export(FAMILIES["bert"], folder / "bert")
    write_rows(folder / "pairs.jsonl", scored(400))
    task_files(str(folder), train=600)
    return folder


@pytest.fixture(scope="module")
def calm(place: Path) -> dict[str, float]:
    """Seconds of each command that nobody disturbs."""
    return {name: undisturbed(command(place, f"calm-{name}")) for name, command in COMMANDS.items()}


def finetuning(place: Path, out: str) -> list[str]:
    settings = ["--set", "epochs=3", "--set", "lr=1e-3"]
    return [
        "finetune",
        str(place / "bert"),
        str(place / "word.yaml"),
        "--out",
        str(place / out),
        *settings,
    ]


def embedding(place: Path, out: str) -> list[str]:
    fields = {"files": [str(place / "pairs.jsonl")], "texts": ["a", "b"], "label": "score", "scores": [0, 5]}
    settings = {
        "train": fields,
        "loss": {"kind": "cosent"},
        "lr": 2e-3,
        "max_length": 16,
        "epochs": 3,
        "every": 20,
    }
    (place / "embed.yaml").write_text(json.dumps(settings))
    return [
        "embed",
        "train",
        str(place / "bert"),
        str(place / "embed.yaml"),
        "--out",
        str(place / out),
    ]


COMMANDS = {"finetune": finetuning, "embed": embedding}


@pytest.mark.long
@pytest.mark.parametrize("draw", range(10))
@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_is_whole_or_not_there(place: Path, calm: dict[str, float], name: str, draw: int) -> None:
    out = place / f"struck-{name}-{draw}"
    struck = Struck(COMMANDS[name](place, out.name), random.Random(f"{name} {draw}"), calm[name])
    struck.run(lambda: ensure_loads_or_is_no_model(out))
    assert weights(out) == weights(place / f"calm-{name}")


@pytest.mark.long
@pytest.mark.parametrize("draw", range(6))
def test_a_table_of_results_is_that_of_an_undisturbed_command(
    folder: Path, tmp_path: Path, draw: int
) -> None:
    uri = new_run(folder, str(tmp_path / "run"))
    Committing(uri).commit(3)
    task = task_files(str(tmp_path))[0]
    options = ["--set", "epochs=1", "--set", "lr=[1e-3,3e-3]", "--set", "batch=8", "--seeds", "2"]

    def command(results: str) -> list[str]:
        return ["evaluate", uri, task, "--results", str(tmp_path / results), *options]

    seconds = undisturbed(command("calm"))
    struck = Struck(command("struck"), random.Random(f"evaluate {draw}"), seconds)
    struck.run(lambda: None)
    assert figures(tmp_path / "struck") == figures(tmp_path / "calm")


def figures(results: Path) -> dict[str, object]:
    """By cell; every object in its place is whole."""
    found = {path.name: json.loads(path.read_bytes())["measured"] for path in results.glob("cells/*.json")}
    assert found
    return found
