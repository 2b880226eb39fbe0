"""`maskfleet evaluate` as a user meets it: exit codes, what is printed, what a repetition computes."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import ray
from safetensors.torch import load_file, save_file

from data_service.store.open import open_store
from launcher.after.evaluate import model
from launcher.after.evaluate.cells import Cell, CellFigures, PlannedCell, find_results, store_result
from tests.support.checks.command import exit_code
from tests.support.checks.guide import keys, promised
from tests.support.models.exports import FAMILIES, export
from tests.support.runs.small_runs import new_run
from tests.support.runs.untrained import Committing
from tests.support.tasks.small_tasks import task_files

QUICK = ("--set", "epochs=1", "--set", "lr=[1e-3,3e-3]", "--set", "batch=8", "--seeds", "1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One cell at a time, in a process that stays."""
    context = ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=128 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(tmp_path_factory.getbasetemp().parent / "ray"),
    )
    yield context.address_info["address"]
    ray.shutdown()


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Command:
    """`maskfleet evaluate` with these arguments."""

    def run(*arguments: object) -> Said:
        return Said(exit_code("evaluate", *arguments), *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def run(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """With checkpoints of steps 3 and 6."""
    uri = new_run(inputs, str(tmp_path_factory.mktemp("runs") / "run"))
    committing = Committing(uri)
    for step in (3, 6):
        committing.commit(step)
    return uri


@pytest.fixture
def word(tmp_path: Path) -> str:
    return task_files(str(tmp_path))[0]


def rows(said: Said) -> list[dict[str, object]]:
    return [json.loads(line) for line in said.out.splitlines()]


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_all_is_computed_and_a_repetition_computes_and_exports_nothing(
    evaluate: Command, run: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (run, word, "--results", tmp_path / "results", "--step", "all", *QUICK)
    first = evaluate(*command, "--json")
    assert first.code == 0, first.err
    assert keys(rows(first)) == promised("evaluate")
    assert [(row["step"], row["cells"], row["missing"]) for row in rows(first)] == [(3, 2, 0), (6, 2, 0)]
    assert re.search(r"\b4 cells: 0 .*\b4 ", first.err)

    monkeypatch.setattr(model, "open_pretrained", None)  # exports nothing
    again = evaluate(*command, "--json")
    assert (again.code, again.out) == (0, first.out)
    assert re.search(r"\b4 cells: 4 .*\b0 ", again.err)
    table = evaluate(run, word, "--results", tmp_path / "results", "--only-table", "--step", 6)
    assert table.code == 0
    assert "accuracy" in table.out
    newest = evaluate(run, word, "--results", tmp_path / "results", *QUICK, "--json")
    assert rows(newest) == rows(first)[1:]


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_model_without_its_head_is_evaluated_and_one_without_a_layer_is_named(
    evaluate: Command, word: str, tmp_path: Path
) -> None:
    """Fine-tuning needs the encoder alone. What cannot be computed takes nothing else with it."""
    folders = [str(tmp_path / name) for name in ("whole", "headless", "broken")]
    for folder, without in zip(folders, ("nothing", "lm_head.", "roberta.encoder.layer.1."), strict=True):
        export(FAMILIES["roberta"], Path(folder))
        weights = load_file(f"{folder}/model.safetensors")
        kept = {name: tensor for name, tensor in weights.items() if not name.startswith(without)}
        save_file(kept, f"{folder}/model.safetensors", {"format": "pt"})
    command = (*folders, word, "--results", tmp_path / "results", *QUICK, "--set", "lr=1e-3", "--json")
    said = evaluate(*command)
    assert said.code == 2
    assert re.search(rf"\bfailed: .* {folders[2]} .*\bword, lr 0\.001, seed 0: ", said.err)
    whole, headless, broken = rows(said)
    assert whole["median"] == headless["median"] is not None
    assert whole["weights"] != headless["weights"]
    assert (broken["median"], broken["missing"]) == (None, 1)
    again = evaluate(*command)
    assert (again.code, again.out) == (2, said.out)
    assert re.search(r"\b3 cells: 2 .*\b1 ", again.err)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("{run}", "glou"), "there is no suite or task 'glou' remedy: did you mean glue?"),
        (
            ("{run}", "{word}", "--task", "sst2"),
            "--task sst2: {word} has no such task remedy: its tasks: word",
        ),
        (("{run}", "{word}", "--step", "seven"), "--step seven is not a number of steps"),
        (("{run}", "{word}", "--step", "7"), "has no checkpoint of step 7 remedy: its checkpoints: 3, 6"),
        (("{tmp}/nothing", "{word}"), "{tmp}/nothing"),
        (("{run}", "{word}", "--set", "epoks=1"), "epoks"),
        (("{run}", "sst2"), "the folder with the files of the task sst2 is not known"),
        (("{run}", "sst2", "--data", "{tmp}"), "SST-2/train.tsv does not exist"),
    ],
)
def test_a_mistake_is_code_2_with_a_remedy(
    evaluate: Command, run: str, word: str, tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    places = {"run": run, "word": word, "tmp": str(tmp_path)}
    given = [argument.format(**places) for argument in arguments]
    said = evaluate(*given, "--results", tmp_path / "results")
    assert said.code == 2
    assert expected.format(**places) in " ".join(said.err.split())
    assert "Traceback" not in said.err


def test_a_folder_of_a_bundled_name_is_data_and_no_suite(
    evaluate: Command, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sst2").mkdir()
    said = evaluate(run, "sst2", "--data", "sst2/", "--results", "results")
    assert str(tmp_path / "sst2" / "SST-2" / "train.tsv") in said.err


@pytest.mark.parametrize("seed", range(3))
def test_a_table_of_stored_results_is_in_its_order_whatever_their_names(
    evaluate: Command, tmp_path: Path, seed: int
) -> None:
    """Results are found by hashed names: averages, rows and the best of equal settings do not depend on them."""
    store = open_store(tmp_path / "results")
    for source, step, task, lr, number in product(("r/b", "r/a/"), (9, 10), ("rte", "sst2", "cola"), (1, 2), (0, 1)):
        cell = Cell(
            source=source,
            step=step,
            weights=f"{source}{step}",
            task=task,
            data=task,
            measure="finetune",
            settings={"lr": lr / 1000, "drawn": seed},
            seed=number,
        )
        figures = CellFigures(metrics={"accuracy": {"cola": 0.1, "rte": 0.5, "sst2": 0.9}[task]})
        store_result(store, PlannedCell(cell, None), figures, None)  # type: ignore[arg-type]
    command = ("r/a", "r/b/", "glue", "--results", tmp_path / "results", "--only-table")
    said = evaluate(*command, "--json")
    order = [(row["checkpoint"], row["step"], row["task"]) for row in rows(said)]
    assert order == [(*of, task) for of in product(("r/a/", "r/b"), (9, 10)) for task in ("cola", "sst2", "rte")]
    assert {(row["settings"]["lr"], *row["values"]) for row in rows(said)} == {(0.001, "0", "1")}  # type: ignore[index,misc]
    averages = [line.split() for line in evaluate(*command).out.splitlines() if " average " in line]
    assert [line[1::2] for line in averages] == [[step, "50.00"] for step in ("9", "10") * 2]
    assert {row["task"] for row in rows(evaluate(*command, "--task", "rte", "--json"))} == {"rte"}
    nothing = evaluate("r/c", *command[2:])
    assert nothing.code == 0
    assert re.search(r"\b0 of 48 ", nothing.err)


def test_a_label_that_is_none_is_found_before_anything_is_computed(
    evaluate: Command, run: str, word: str, tmp_path: Path
) -> None:
    lines = (tmp_path / "dev.tsv").read_text().splitlines()
    lines[6] = "machine\t7"
    (tmp_path / "dev.tsv").write_text("\n".join(lines) + "\n")
    said = evaluate(run, word, "--results", tmp_path / "results")
    assert said.code == 2
    assert "dev.tsv" in said.err
    assert "'7'" in said.err
    assert find_results(open_store(tmp_path / "results")) == {}
