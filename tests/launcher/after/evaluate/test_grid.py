"""A grid over real Ray: workers that die, cells that fail, cells of other commands; nothing is computed twice."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import ray.cloudpickle

from data_service.errors import InputError
from data_service.store.base import Store
from data_service.store.errors import StoreUnavailable
from data_service.store.open import open_store
from launcher.after.evaluate.cell import CellFigures, CellWork, Results
from launcher.after.evaluate.compute_cell import CellResources, Ended, Waiting, claimed
from launcher.after.evaluate.evaluation import GridEvaluation, plan, recorded
from launcher.after.finetune.pretrained import LocalModel
from tests.support.tasks import small_cells
from tests.support.tasks.small_cells import Fitting, checkpoints, diary

pytestmark = pytest.mark.cluster
ONE = CellResources(cpus=1)


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cell at a time: each process of Ray costs seconds of imports."""
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=128 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(tmp_path_factory.getbasetemp().parent / "ray"),
    )
    for module in (small_cells, sys.modules[__name__]):  # workers do not know the tests' folders
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    ray.shutdown()


@dataclass(frozen=True)
class Broken(Fitting):
    """Cannot be computed."""

    ours: bool = True

    def measure(self, pretrained: LocalModel, seed: int, place: Path) -> CellFigures:
        self._note("begins", self.task)
        if self.ours:
            raise InputError("train.tsv:7: label 'x' is not one of 0, 1", remedy="correct the line")
        raise ZeroDivisionError("division by zero")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "results")


@pytest.fixture
def models(tmp_path: Path) -> list[LocalModel]:
    return checkpoints(tmp_path, (0.1, 2.0))


def run(
    store: Store, works: list[CellWork], models: list[LocalModel]
) -> tuple[GridEvaluation, list[Ended | Waiting]]:
    evaluation = GridEvaluation(Results(store), "small", works)
    return evaluation, list(evaluation.compute(models, ONE))


@pytest.mark.long
def test_a_worker_dies_cells_fail_and_the_rest_is_computed_once(
    tmp_path: Path, store: Store, models: list[LocalModel]
) -> None:
    notes = str(tmp_path / "diary")
    good = [Fitting("a", lr, notes, dies=lr == 0.1) for lr in (0.1, 1.0)]
    bad = [Broken("label", 1.0, notes), Broken("code", 1.0, notes, ours=False)]
    evaluation, events = run(store, plan(models[:1], [*good, *bad], [0]), models)

    assert not any(line["living"] for line in diary(Path(notes)) if line["cell"] != "code")
    begun = [line["cell"].split()[-3:] for line in diary(Path(notes)) if line["what"] == "begins"]
    assert begun.count(["a", "0.1", "0"]) == 2
    assert begun.count(["a", "1.0", "0"]) == 1
    assert (begun.count(["label"]), begun.count(["code"])) == (1, 2)
    assert sum(isinstance(event, Ended) for event in events) == 4
    label, code = sorted(evaluation.failures, key=lambda failure: failure.trace)
    assert re.search(
        rf" {models[0].name} .*\blabel, lr 1, seed 0: train\.tsv:7: .*'x'.* 0, 1$", label.problem
    )
    assert "line" in label.remedy
    assert not label.passes
    assert re.search(r"\bcode, lr 1, seed 0: ZeroDivisionError: ", code.problem)
    assert "ZeroDivisionError" in code.trace
    assert [(row.task, row.missing, row.median is None) for row in evaluation.table()] == [
        ("a", 0, False), ("label", 1, True), ("code", 1, True),
    ]  # fmt: skip

    again, events = run(store, plan(models[:1], good, [0]), models)
    assert (again.before, again.computed, events) == (2, 0, [])
    assert again.table() == evaluation.table()[:1]
    assert recorded(Results(store), [], [], None)[0] == again.table()[0]


@pytest.mark.long
def test_two_commands_at_once_compute_no_cell_twice_and_have_the_same_table(
    tmp_path: Path, store: Store, models: list[LocalModel]
) -> None:
    notes = str(tmp_path / "diary")
    works = plan(models, [Fitting("a", lr, notes) for lr in (0.1, 1.0)], range(2))
    tables = []

    def command() -> None:
        evaluation, _ = run(store, works, models)
        tables.append(evaluation.table())

    threads = [threading.Thread(target=command) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tables[0] == tables[1]
    assert all(row.missing == 0 for row in tables[0])
    cells = [line["cell"] for line in diary(Path(notes)) if line["what"] == "begins"]
    assert len(cells) == len(set(cells)) == 8


@pytest.mark.long
def test_cells_of_another_process_are_waited_for_and_taken_over_when_it_ends(
    store: Store, models: list[LocalModel]
) -> None:
    works = plan(models, [Fitting("a", 1.0)], [0])
    evaluation = GridEvaluation(Results(store), "small", works)
    with claimed(store, works[0].cell.key) as other:
        assert other is None
        events = evaluation.compute(models, ONE)
        found: list[Ended | Waiting] = []
        while not found or not isinstance(found[-1], Waiting):
            found.append(next(events))
    found += list(events)
    assert f"process {os.getpid()} on host" in next(
        event.reason for event in found if isinstance(event, Waiting)
    )
    assert [event.computed for event in found if isinstance(event, Ended)] == [True, True]
    assert evaluation.table()[0].missing == 0


def test_two_commands_whose_cells_fail_do_not_wait_for_each_other(
    store: Store, models: list[LocalModel]
) -> None:
    """What one of them has failed at is nobody's any more."""
    works = plan(models[:1], [Broken(f"label {number}", 1.0) for number in range(4)], [0])
    failures: list[int] = []

    def command() -> None:
        failures.append(len(run(store, works, models)[0].failures))

    threads = [threading.Thread(target=command, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == [4, 4]


@dataclass(frozen=True)
class Unanswered(Fitting):
    """Meets a store that does not answer, or dies."""

    def measure(self, pretrained: LocalModel, seed: int, place: Path) -> CellFigures:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise StoreUnavailable.at("s3://results", "no answer")


def test_a_command_whose_store_is_silent_ends_although_cells_die(
    store: Store, models: list[LocalModel]
) -> None:
    """The cell that died would be computed again, which is not begun any more."""
    works = plan(models[:1], [Unanswered("a", 1.0), Unanswered("b", 1.0, dies=True)], [0])
    ended: list[GridEvaluation] = []
    thread = threading.Thread(target=lambda: ended.append(run(store, works, models)[0]), daemon=True)
    thread.start()
    thread.join(60)
    (evaluation,) = ended
    assert isinstance(evaluation.trouble, StoreUnavailable)
    assert [failure.passes for failure in evaluation.failures] == [True]
