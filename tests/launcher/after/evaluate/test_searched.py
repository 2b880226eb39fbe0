"""Beside a figure stands whether the model's corpora were searched for the task's texts: of a run, and of an export."""

import hashlib
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from checkpoints.hf.export import MODEL_CARD
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.prepare.configuration import Preparation
from data_service.prepare.contamination import build_index, dump_index
from data_service.prepare.prepare import prepare
from launcher.after.evaluate.cells import CellFigures, CellResult, plan_cells, tabulate_results
from launcher.after.evaluate.measures import find_contamination_searches, plan_measures
from launcher.after.evaluate.model import find_models
from launcher.after.export.export import export_run
from launcher.after.export.model_card import DATA_CARDS_FILE
from launcher.after.finetune.pretrained import folder_digest
from launcher.after.tasks.summary import texts_of_task
from launcher.after.tasks.task import load_task
from launcher.observe.inspect.report.task_table import TableRow, column_names, searched_note, table_cells
from launcher.runtime.recipe.load import load
from launcher.runtime.run.create import create_run
from launcher.runtime.run.record import open_run
from tests.support.data.raw_text import ignore_progress
from tests.support.runs.small_runs import SETTINGS, SMALL, new_run
from tests.support.runs.untrained import Committing
from tests.support.tasks.small_tasks import task_files


@pytest.fixture(scope="module")
def folder(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task with sentences that are long enough, and a corpus whose text was searched for those of its dev split."""
    folder = tmp_path_factory.mktemp("searched")
    task_files(str(folder))
    for split in ("dev", "test"):
        table = [line.split("\t") for line in (folder / f"{split}.tsv").read_text().splitlines()]
        (folder / f"{split}.tsv").write_text(
            "".join(f"{text} {split} one two three {number}\t{label}\n" for number, (text, label) in enumerate(table))
        )
    word = load_task(str(folder / "word.yaml"))
    content = dump_index(build_index(one for one in texts_of_task(word) if one.split == "word/dev"))
    (folder / "dev.ngrams").write_bytes(content)
    stage = {
        "stage": "decontaminate",
        "index": str(folder / "dev.ngrams"),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    source = {"source": "web", "files": [str(inputs / "text.jsonl")], "constants": {"licence": "CC0-1.0"}}
    made = Preparation.model_validate({"inputs": [source], "stages": [stage]})
    prepare(made, str(folder / "prepared"), 1, ignore_progress)
    options = BuildOptions(heldout_fraction=0.1, block_tokens=256)
    shutil.copytree(inputs / "tokenizer", folder / "tokenizer")
    build_corpus(
        [str(folder / "prepared")],
        str(folder / "corpus"),
        str(folder / "tokenizer"),
        options,
        ignore_progress,
    )
    Committing(new_run(folder, "run")).commit(3)
    return folder


def row_of(model: str, folder: Path) -> TableRow:
    """The row of a model and the task."""
    work = plan_measures([load_task(str(folder / "word.yaml"))], ["lr=1e-3"])
    (planned,) = plan_cells(find_models([model], []), work, [0])
    cell, (searched,) = planned.cell, find_contamination_searches([planned]).values()
    result = CellResult(cell=cell, measured=CellFigures(metrics={"accuracy": 0.5}), searched=searched, versions={})
    (row,) = tabulate_results([cell], {cell.key: result})
    return row


@pytest.mark.long
def test_of_a_run_and_of_its_export(folder: Path, tmp_path: Path) -> None:
    run = open_run(str(folder / "run"))
    export_run(run, None, str(tmp_path / "model"))
    of_run, of_export = (row_of(str(place), folder) for place in (folder / "run", tmp_path / "model"))
    assert of_run.searched == of_export.searched == {"dev": True, "test": False}
    assert table_cells([of_run])[0][-2] == "dev"
    assert "### text" in (tmp_path / "model" / MODEL_CARD).read_text()
    assert "word/dev" in (tmp_path / "model" / MODEL_CARD).read_text()
    assert json.loads((tmp_path / "model" / DATA_CARDS_FILE).read_text())["sources"]["text"]["train"]["documents"]
    before = folder_digest(tmp_path / "model")
    (tmp_path / "model" / DATA_CARDS_FILE).unlink()
    assert folder_digest(tmp_path / "model") == before
    assert row_of(str(tmp_path / "model"), folder).searched is None


def test_other_texts_under_the_same_name_do_not_count(folder: Path, tmp_path: Path) -> None:
    for name in ("word.yaml", "train.tsv", "dev.tsv", "test.tsv"):
        shutil.copy(folder / name, tmp_path)
    with (tmp_path / "dev.tsv").open("a") as file:
        file.write("one more sentence of another hand that nobody searched for\t1\n")
    assert row_of(str(folder / "run"), tmp_path).searched == {"dev": False, "test": False}


def test_all_sources_count(folder: Path, inputs: Path, tmp_path: Path) -> None:
    """A second source, of which nothing is known."""
    places = (
        f"corpus.sources={{text: {{uri: {folder}/corpus}}, more: {{uri: {inputs}/corpus}}}}",
        f"tokenizer.uri={folder}/tokenizer",
    )
    uri = str(tmp_path / "run")
    create_run(load(SMALL, (*places, *SETTINGS)), uri, datetime.now(UTC))
    Committing(uri).commit(3)
    row = row_of(uri, folder)
    known = row_of(str(folder / "run"), folder)
    assert row.searched == {"dev": False, "test": False}
    assert len(table_cells([row])[0]) == len(column_names([row])) == len(column_names([])) < len(column_names([known]))
    assert [searched_note([row]), searched_note([known])].count(None) == 1
    assert table_cells([row, known])[0][-2] == "no"
