"""Probe, similarity and anisotropy as cells of a grid: the figures of `maskfleet diagnose`, by model and data."""

from pathlib import Path

import pytest

from launcher.after.diagnose.measures import read_own_data
from launcher.after.diagnose.states import open_frozen
from launcher.after.evaluate.cells import CellFigures, plan_cells
from launcher.after.evaluate.measures import frozen_measures, main_figures
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.tasks.suite import load_frozen, load_suite
from launcher.errors import TaskError
from launcher.runtime.run.evaluations import Figure
from tests.support.tasks.small_tasks import model, task_files

SUITE = """
name: frozen
frozen:
  - probe: {task: word.yaml}
  - similarity: {task: shared.yaml, poolings: [mean, cls]}
  - anisotropy: {task: word.yaml, texts: 30}
"""


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return model("bert", tmp_path_factory.mktemp("models"))


@pytest.fixture
def suite(tmp_path: Path) -> str:
    task_files(str(tmp_path))
    (tmp_path / "frozen.yaml").write_text(SUITE)
    return str(tmp_path / "frozen.yaml")


@pytest.mark.long
def test_a_suite_names_them_and_their_figures_are_those_of_the_frozen_model(
    suite: str, pretrained: LocalModel, tmp_path: Path
) -> None:
    assert load_suite(suite) == ()
    wanted = load_frozen(suite)
    works = plan_cells([pretrained], frozen_measures(wanted), range(3))
    assert [(work.cell.measure, work.cell.task, work.cell.seed) for work in works] == [
        ("probe", "probe word", 0), ("similarity", "similarity shared", 0), ("anisotropy", "anisotropy word", 0),
    ]  # fmt: skip
    frozen = open_frozen(str(pretrained.folder))
    for work, task in zip(works, wanted, strict=True):
        measured = work.measure.compute(pretrained, 0, tmp_path)
        own = read_own_data(task)
        assert own is not None
        figures = own.figures(frozen)
        assert measured.metrics == main_figures(figures)
        assert measured.details["figures"] == [figure.model_dump(exclude_none=True) for figure in figures]
        assert CellFigures.model_validate_json(measured.model_dump_json()) == measured


def test_their_keys_follow_data_and_settings_and_not_places(
    suite: str, pretrained: LocalModel, tmp_path: Path
) -> None:
    def keys() -> list[str]:
        works = plan_cells([pretrained], frozen_measures(load_frozen(suite)), [0])
        return [work.cell.key for work in works]

    before = keys()
    assert len(set(before)) == 3
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in tmp_path.glob("*.*"):
        (moved / path.name).write_bytes(path.read_bytes())
    there = plan_cells([pretrained], frozen_measures(load_frozen(str(moved / "frozen.yaml"))), [0])
    assert [work.cell.key for work in there] == before
    Path(suite).write_text(SUITE.replace("texts: 30", "texts: 31"))
    assert [one == other for one, other in zip(keys(), before, strict=True)] == [True, True, False]
    lines = (tmp_path / "train.tsv").read_text().splitlines()
    (tmp_path / "train.tsv").write_text("\n".join(lines[1:]) + "\n")
    Path(suite).write_text(SUITE)
    assert [one == other for one, other in zip(keys(), before, strict=True)] == [False, True, True]


def test_a_machine_with_other_files_refuses(suite: str, pretrained: LocalModel, tmp_path: Path) -> None:
    (probe, *_) = frozen_measures(load_frozen(suite))
    lines = (tmp_path / "dev.tsv").read_text().splitlines()
    (tmp_path / "dev.tsv").write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(TaskError, match=r"\bfiles\b.*\bmachine\b"):
        probe.compute(pretrained, 0, tmp_path)


@pytest.mark.parametrize("measure", ["heldout", "anisotropy"])
def test_what_needs_a_runs_text_is_refused(suite: str, measure: str) -> None:
    Path(suite).write_text(f"name: x\nfrozen: [{{{measure}: {{}}}}]\n")
    with pytest.raises(TaskError, match=rf"\b{measure}\b.*held-out"):
        frozen_measures(load_frozen(suite))


def test_the_same_twice_and_a_suite_of_nothing_are_mistakes(suite: str) -> None:
    Path(suite).write_text(SUITE + "  - probe: {task: word.yaml, pooling: cls}\n")
    with pytest.raises(TaskError, match=r"\bword\b.*\btwice\b"):
        load_frozen(suite)
    Path(suite).write_text("name: x\ntasks: []\n")
    with pytest.raises(TaskError, match=r"\bsuite\b.*\btasks\b"):
        load_suite(suite)


def test_the_headline_is_the_last_layers_unless_all_are_measured_together() -> None:
    figures = [
        Figure(measure="accuracy", value=0.9, pooling="mean"),
        Figure(measure="accuracy", value=0.7, layer=2, pooling="mean"),
        Figure(measure="spearman", value=0.1, layer=0, pooling="cls", form="raw"),
        Figure(measure="spearman", value=0.2, layer=2, pooling="cls", form="raw"),
        Figure(measure="spearman", value=None, layer=2, pooling="cls", form="whitened"),
    ]
    assert main_figures(figures) == {"accuracy": 0.9, "spearman": 0.2, "spearman (cls, whitened)": None}
