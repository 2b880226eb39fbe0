"""What cannot be fine-tuned: said in our words before anything is trained, as a user meets it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from data_service.errors import UserError as DataError
from encoder_core.errors import UserError as ModelError
from launcher.app.cli.main import app
from tests.support.tasks.small_tasks import Models, description, task

Spoil = Callable[[Path], None]
KIND = "pair_classification"


def rewritten(split: str, change: Callable[[list[dict[str, object]]], object]) -> Spoil:
    """The lines of a split, changed in place or replaced by what `change` returns."""

    def spoil(folder: Path) -> None:
        path = folder / f"{KIND}.{split}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found = change(lines)
        kept = found if isinstance(found, list) else lines
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    return spoil


def described(extra: str) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "task.yaml"
        path.write_text(path.read_text() + extra)

    return spoil


def foreign_tokenizer(folder: Path) -> None:
    for path in (folder / "roberta").glob("*token*"):
        shutil.copyfile(path, folder / "model" / path.name)


def another_kind_of_model(folder: Path) -> None:
    """One for which transformers has no class that tells texts apart."""
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    config.vocab_size, config.pad_token_id = 100, 0
    transformers.ViTModel(config).save_pretrained(folder / "model")


def all_yes(lines: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{**line, "label": "either"} for line in lines]


def long(lines: list[dict[str, object]]) -> None:
    lines[2]["text"] = "rank " * 200


CASES: dict[str, tuple[Spoil, tuple[str, ...], str]] = {
    "label": (
        rewritten("dev", lambda lines: lines[4].update(label="maybe")),
        (),
        "dev.jsonl, line 5: the label 'maybe' is not one of neither, either",
    ),
    "one label": (
        rewritten("dev", all_yes),
        (),
        "every example of the split dev has the label 'either', but f1 needs two",
    ),
    "longer than the model": (lambda folder: None, ("max_length=97",), "more than the 96 tokens"),
    "kept whole and too long": (
        lambda folder: (rewritten("train", long)(folder), described("truncation: only_second\n")(folder))[0],
        (),
        "truncation only_second",
    ),
    "tokenizer": (foreign_tokenizer, (), "does not fit the model"),
    "no such head": (another_kind_of_model, (), "cannot load .*SequenceClassification"),
    "setting": (lambda folder: None, ("layers=weighted",), "'layers' was removed"),
}


@pytest.fixture
def place(models: Models, tmp_path: Path) -> Path:
    """`model`, `task.yaml` and its splits train, dev and test."""
    for family, name in (("bert", "model"), ("roberta", "roberta")):
        shutil.copytree(models(family).folder, tmp_path / name)
    task(KIND, tmp_path)
    shutil.copyfile(tmp_path / f"{KIND}.dev.jsonl", tmp_path / f"{KIND}.test.jsonl")
    text = description(KIND).replace("files: {", f"files: {{test: {KIND}.test.jsonl, ")
    (tmp_path / "task.yaml").write_text(text.replace("[accuracy]", "[accuracy, f1]"))
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_before_training(place: Path, name: str) -> None:
    spoil, assignments, problem = CASES[name]
    spoil(place)
    command = ["finetune", str(place / "model"), str(place / "task.yaml"), "--out", str(place / "out")]
    result = CliRunner().invoke(app, [*command, *(word for one in assignments for word in ("--set", one))])
    assert isinstance(result.exception, DataError | ModelError), result.exception
    with pytest.raises((DataError, ModelError), match=problem):
        raise result.exception
    assert result.exception.remedy
    assert "epoch" not in result.output
    assert not (place / "out").exists()
