"""The wheel, used as users do: from folders of their own, some of which hold packages that bear the names of ours.

It is the wheel of this checkout, in an environment of its own over our dependencies.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from data_service.stream.stream import rows_per_slab

ROOT = Path(__file__).parents[4]
_PACKAGES = ("launcher", "checkpoints", "data_service", "encoder_core")
_BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "infra", *_PACKAGES)


def build(folder: Path) -> Path:
    """The wheel, built in `folder` from a copy: building leaves files beside the sources."""
    source = folder / "source"
    source.mkdir()
    for name in _BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-w", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("maskfleet-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """The programs' folder of a new environment in `folder` that has the wheel, and sees this one's other packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    bin, (packages,) = folder / "bin", (folder / "lib").glob("python3*/site-packages")
    dependencies = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    pip = [sys.executable, "-m", "pip", "--python", str(bin / "python"), "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--ignore-installed", str(wheel)], check=True)
    return bin


def obstruct(folder: Path, names: Iterable[str] = _PACKAGES) -> Path:
    """Packages in `folder` that bear the names of ours and break whoever imports them."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('a stranger: {name}')\n")
    return folder


def run(*command: str | Path, cwd: Path, check: bool = True, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A program of the environment, started in `cwd`, with nothing of ours in its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | variables,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


TASKS = """
import os
from data_service.ingest.ray_pool import ray_pool
from data_service.store.open import open_store
from data_service.stream.stream import rows_per_slab

class Task:
    receipt_key, folder = "receipt", os.path.abspath("tasks")
    layout = property(lambda self: self)
    def open_output(self):
        return open_store(self.folder)

class Receipt:
    def __init__(self):
        self.rows = rows_per_slab(512)
    def model_dump_json(self):
        return str(self.rows)

with ray_pool(2, 0) as pool:
    print(*(receipt.rows for _, receipt in pool.run(lambda task, store: Receipt(), [Task(), Task()])))
"""
"""Two tasks of Ray that import our code: a build of so little text has one, which does without Ray."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the installation's programs."""
    return install(wheel, tmp_path_factory.mktemp("environment") / "env")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    return obstruct(tmp_path / "project")


@pytest.mark.long
def test_the_wheel_holds_all_of_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = ("encoder_core", "data_service", "checkpoints", "launcher")
    paths = [path for package in packages for path in (ROOT / package).rglob("*") if path.is_file()]
    files = {str(path.relative_to(ROOT)) for path in paths if path.suffix not in (".md", ".pyc")}
    facade = {name for name in files if name.startswith("launcher/maskfleet/")}
    assert files - facade <= names
    assert {name.removeprefix("launcher/") for name in facade} <= names
    assert not facade & names
    assert {f"{package}/py.typed" for package in (*packages, "maskfleet")} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name and ".data" not in name} == {
        *packages, "maskfleet",
    }  # fmt: skip


def test_what_evaluation_needs_is_an_extra(wheel: Path) -> None:
    """`pip install maskfleet` brings none of it."""
    (name,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")]
    lines = zipfile.ZipFile(wheel).read(name).decode().splitlines()
    needed = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    beyond = {
        "transformers", "sentence-transformers", "scikit-learn", "scipy", "seqeval", "accelerate", "datasets",
    }  # fmt: skip
    always = {re.split(r"[^\w-]", line)[0] for line in needed if "extra ==" not in line}
    assert len(always) > 20
    assert not always & beyond
    of_extra = {line.partition(";")[0].strip() for line in needed if "extra == 'evaluate'" in line.replace('"', "'")}
    assert of_extra == beyond


def test_it_can_be_run_as_a_module(installed: Path, hostile: Path) -> None:
    assert "maskfleet" in run(installed / "python", "-m", "maskfleet", "--version", cwd=hostile).stdout


def test_a_shell_completes_commands(installed: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "_MASKFLEET_COMPLETE": "complete_bash",
        "COMP_WORDS": "maskfleet che",
        "COMP_CWORD": "1",
    }
    assert run(installed / "maskfleet", cwd=tmp_path, **asked).stdout.split() == ["checkpoints"]


def test_importing_it_names_the_folder_in_the_way(installed: Path, hostile: Path) -> None:
    failed = run(installed / "python", "-c", "import maskfleet", cwd=hostile, check=False)
    last = failed.stderr.splitlines()[-1]
    assert last.startswith(f"maskfleet.InTheWay: {hostile / 'launcher'} ")
    assert "rename" in last


def test_a_module_in_the_way_is_named_too(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints.py").write_text("step = 1\n")
    code = "import checkpoints, maskfleet"
    failed = run(installed / "python", "-c", code, cwd=tmp_path, check=False)
    assert f"{tmp_path / 'checkpoints.py'} " in failed.stderr


def test_folders_without_code_are_in_nobodys_way(installed: Path, tmp_path: Path) -> None:
    """Most `checkpoints/` of users hold weights."""
    (tmp_path / "checkpoints").mkdir()
    code = "import maskfleet, sys; print(maskfleet.UserError.__module__, 'torch' in sys.modules)"
    assert run(installed / "python", "-c", code, cwd=tmp_path).stdout.split() == [
        "data_service.errors",
        "False",
    ]


@pytest.mark.long
@pytest.mark.cluster
def test_a_run_is_trained_through_ray_beside_such_folders(installed: Path, hostile: Path) -> None:
    """Text to model, workers and ranks in Ray included, where every one of our packages has a broken namesake."""
    lines = [
        json.dumps({"text": f"Rank {n} reads its rows. Every step is the same on any machine."}) for n in range(400)
    ]
    for part in range(2):
        (hostile / f"{part}.jsonl").write_text("\n".join(lines[part::2]))
    program, text = installed / "maskfleet", ("0.jsonl", "1.jsonl")
    run(program, "tokenizer", "train", *text, "--vocab-size", "320", "--out", "bpe", cwd=hostile)
    build = ("corpus", "build", *text, "--tokenizer", "bpe", "--out", "corpus", "--heldout", "0.1")
    run(program, *build, "--workers", "2", cwd=hostile)
    assert run(installed / "python", "-P", "-c", TASKS, cwd=hostile).stdout.split() == [str(rows_per_slab(512))] * 2
    sets = (
        "corpus.sources.text.uri=corpus",
        "corpus.heldout.fraction=0.1",
        "tokenizer.uri=bpe",
        "phases.0.steps=4",
    )
    options = [part for value in (*sets, "schedule.warmup=1") for part in ("--set", value)]
    run(program, "init", "quickstart", "first", "--tiny", *options, cwd=hostile)
    node = ("--nodes", "1", "--cpus-per-node", "2", "--memory", "8GiB")
    assert "#SBATCH" in run(program, "launch", "slurm", "first", *node, cwd=hostile).stdout
    assert "step 4 of 4" in run(program, "train", "first", cwd=hostile, PYTHONPATH=str(hostile)).stdout
    shown = run(program, "checkpoints", "export", "first", "--out", "model", cwd=hostile).stdout
    assert "exported step 4" in shown
