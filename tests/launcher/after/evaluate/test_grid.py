"""Grids on a Ray of their own: a cell that is killed is computed again, one that fails takes no other with it, and a
grid whose command is killed is completed by the same command."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from data_service.store.open import open_store
from encoder_core.errors import ModelError
from launcher.after.evaluate import grid
from launcher.after.evaluate.cells import CellFigures, MeasureSpec, PlannedCell, find_results, plan_cells
from launcher.after.evaluate.grid import CellFailure, CellResources, compute_cells
from launcher.after.evaluate.measures import plan_measures
from launcher.after.finetune.pretrained import LocalModel, folder_digest
from launcher.after.tasks.task import load_task
from launcher.errors import OptionError, TaskError
from tests.support.models.exports import FAMILIES, export
from tests.support.tasks.small_tasks import task_files

pytestmark = pytest.mark.cluster


def counted(pretrained: LocalModel, seed: int, *, task: str, diary: str, fault: str, times: int) -> CellFigures:
    """Count the bytes of a model's configuration, after noting in `diary` that it began. `fault`: what happens at its
    first `times` beginnings: `dies`, `mistake` or `breaks`."""
    with open(diary, "a") as file:
        file.write(f"{task} {seed}\n")
    if Path(diary).read_text().count(f"{task} {seed}\n") <= times:
        match fault:
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "mistake":
                raise TaskError("no such file", remedy="give one")
            case "breaks":
                raise ValueError("broken")
    size = (pretrained.folder / "config.json").stat().st_size
    return CellFigures(metrics={"bytes": float(size + seed)})


def counting(task: str, diary: str, fault: str = "", times: int = 0) -> MeasureSpec:
    compute = partial(counted, task=task, diary=diary, fault=fault, times=times)
    return MeasureSpec("counting", task, load_task("sst2"), task, {}, compute, seeded=True)


@pytest.fixture
def pretrained(tmp_path: Path) -> LocalModel:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return LocalModel(str(folder), None, folder, folder_digest(folder))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    ray.init(
        address="local", num_cpus=2, object_store_memory=128 << 20, include_dashboard=False, log_to_driver=False,
        _temp_dir=str(tmp_path_factory.getbasetemp().parent / "ray"),
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}},
    )  # fmt: skip
    yield
    ray.shutdown()


def test_a_machine_with_other_files_refuses(pretrained: LocalModel, tmp_path: Path) -> None:
    for path in task_files(str(tmp_path)):
        (measure, *_) = plan_measures([load_task(path)], [])
        for file in tmp_path.glob("*.tsv"):
            file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
        with pytest.raises(TaskError, match=r"\bfiles\b.*\bmachine\b"):
            measure.compute(pretrained, 0)


@pytest.mark.usefixtures("cluster")
def test_deaths_are_repeated_and_failures_are_named(pretrained: LocalModel, tmp_path: Path) -> None:
    diary = str(tmp_path / "diary")
    measures = [
        counting("whole", diary),
        counting("dies-once", diary, "dies", 1),
        counting("dies-always", diary, "dies", 99),
        counting("mistaken", diary, "mistake", 99),
        counting("broken", diary, "breaks", 99),
    ]
    works = plan_cells([pretrained], measures, [0])
    ended = list(compute_cells(works, {pretrained.digest: pretrained}, CellResources()))
    outcomes = {work.cell.task: outcome for work, outcome in ended}
    size = float((pretrained.folder / "config.json").stat().st_size)
    assert outcomes["whole"] == outcomes["dies-once"] == CellFigures(metrics={"bytes": size})
    failures = {name: one for name, one in outcomes.items() if isinstance(one, CellFailure)}
    assert set(failures) == {"dies-always", "mistaken", "broken"}
    assert works[2].cell.name in failures["dies-always"].problem
    assert (failures["mistaken"].remedy, failures["mistaken"].trace) == ("give one", "")
    assert "ValueError" in failures["broken"].problem
    assert "Traceback" in failures["broken"].trace
    assert Path(diary).read_text().count("dies-always") == 3


class UnreadableThere:
    """A computation that raises `error` wherever another process than `pid` reads it, after a line in `diary`."""

    def __init__(self, error: BaseException, diary: str) -> None:
        self.error, self.diary, self.pid = error, diary, os.getpid()

    def __call__(self, pretrained: LocalModel, seed: int) -> CellFigures:
        raise AssertionError("it cannot be read")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.pid:
            with open(self.diary, "a") as file:
                file.write("read\n")
            raise self.error


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("error", "tries", "transient", "remedy"),
    [
        (TaskError("no such file", remedy="give one"), 1, False, "give one"),
        (ModelError("no such model", remedy="give another"), 1, False, "give another"),
        (ModuleNotFoundError("No module named 'x'"), 1, False, ""),
        (KeyboardInterrupt(), 1, True, ""),  # which is how Ray cancels a task
        (MemoryError(), 3, False, "--cpus-per-cell"),
        (SystemExit(1), 3, False, "--cpus-per-cell"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_deaths_are_repeated(
    pretrained: LocalModel, tmp_path: Path, error: BaseException, tries: int, transient: bool, remedy: str
) -> None:
    diary = tmp_path / "diary"
    measure = MeasureSpec("counting", "a", load_task("sst2"), "a", {}, UnreadableThere(error, str(diary)))
    works = plan_cells([pretrained], [measure], [0])
    ((_, failure),) = compute_cells(works, {pretrained.digest: pretrained}, CellResources())
    assert isinstance(failure, CellFailure)
    assert diary.read_text().count("read") == tries
    assert ("died" in failure.problem) == (tries > 1)
    assert failure.is_transient == transient
    assert remedy in failure.remedy
    if isinstance(error, TaskError | ModelError):
        assert failure.problem == f"{works[0].cell.name}: {error.problem}"
        assert failure.trace == ""
    if isinstance(error, ImportError):
        assert f"ModuleNotFoundError: {error}" in failure.problem
        assert "__setstate__" in failure.trace


def test_models_reach_other_machines_as_their_files(pretrained: LocalModel, tmp_path: Path) -> None:
    packed = grid._pack_model(pretrained)
    there = grid._unpack_model(replace(pretrained, folder=Path("/nowhere")), packed, tmp_path / "place")
    assert folder_digest(there.folder) == pretrained.digest
    assert grid._unpack_model(there, {}, tmp_path / "place") == there  # another process of the machine has them already


def test_a_cell_that_wants_more_than_the_machine_has(pretrained: LocalModel, tmp_path: Path) -> None:
    if ray.is_initialized():
        ray.shutdown()
    works: list[PlannedCell] = plan_cells([pretrained], [counting("a", str(tmp_path / "diary"))], [0])
    with pytest.raises(OptionError, match="--cpus-per-cell"):
        list(compute_cells(works, {pretrained.digest: pretrained}, CellResources(cpus=4096)))


@pytest.mark.long
def test_a_killed_grid_computes_only_what_is_missing(tmp_path: Path) -> None:
    """Three learning rates and three seeds; the command is killed after some cells."""
    export(FAMILIES["bert"], tmp_path / "model")
    word, results = task_files(str(tmp_path))[0], tmp_path / "results"
    command = [
        sys.executable, "-m", "maskfleet", "evaluate", str(tmp_path / "model"), word, "--results", str(results),
        "--set", "epochs=1", "--set", "lr=[1e-3,2e-3,3e-3]", "--set", "batch=8", "--seeds", "3", "--json",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 240
    while len(find_results(open_store(results))) < 2 and time.monotonic() < until:
        time.sleep(0.2)
    process.kill()
    process.wait()
    before = find_results(open_store(results))
    assert 2 <= len(before) < 9
    stamps = {path.name: path.stat().st_mtime_ns for path in (results / "cells").iterdir()}
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (row,) = [json.loads(line) for line in ended.stdout.splitlines()]
    assert (row["cells"], row["missing"], row["choices"]) == (9, 0, 3)
    after = {path.name: path.stat().st_mtime_ns for path in (results / "cells").iterdir()}
    assert len(after) == 9
    assert {name: after[name] for name in stamps} == stamps
