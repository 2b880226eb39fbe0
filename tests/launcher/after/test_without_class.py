"""A family for which transformers has no class: what needs one refuses it, and the commands of the remedy take it."""

import json
import re
from pathlib import Path

import pytest

from encoder_core.errors import ModelError
from encoder_core.families.neobert import NeoBertConfig
from launcher.after.embed.model import load_model
from launcher.after.embed.settings import EncodingSettings
from launcher.after.finetune.pretrained import open_pretrained
from launcher.runtime.recipe.objective import RecipeObjective
from tests.support.checks.command import exit_code, maskfleet
from tests.support.models.exports import MLM, SHAPE, Family, export

NEOBERT = Family(NeoBertConfig(**SHAPE), RecipeObjective(mlm=MLM), "wordpiece", "bert")
CLASSES = """name: cls
kind: classification
published: here
files: {train: data.tsv, dev: data.tsv}
format: tsv
fields: {first: 1, label: 2}
labels: ["0", "1"]
metrics: [accuracy]
"""
PAIRS = """name: sts
kind: similarity
published: here
files: {dev: pairs.tsv}
format: tsv
fields: {first: 1, second: 2, label: 3}
score_range: [0, 5]
metrics: [spearman]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("neobert")
    export(NEOBERT, place / "model")
    (place / "cls.yaml").write_text(CLASSES)
    (place / "data.tsv").write_text("a rank reads rows\t0\nthe loss falls\t1\n" * 8)
    (place / "sts.yaml").write_text(PAIRS)
    (place / "pairs.tsv").write_text("a rank\trows\t1\nthe loss\tloss falls\t4\nrows\tthe loss\t2\n")
    (place / "pairs.jsonl").write_text(json.dumps({"query": "a rank", "positive": "rows"}) + "\n")
    return place


NEEDS_A_CLASS = {
    "finetune": ("finetune", "model", "cls.yaml", "--out", "tuned"),
    "embed eval": ("embed", "eval", "model", "sts.yaml"),
    "embed negatives": ("embed", "negatives", "model", "pairs.jsonl", "--out", "mined.jsonl"),
}


@pytest.mark.parametrize("words", NEEDS_A_CLASS.values(), ids=NEEDS_A_CLASS)
def test_what_needs_a_class_refuses_it(
    place: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert exit_code(*words) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "diagnose" in said
    assert not {"save_pretrained", "export"} & set(re.findall(r"\w+", said)), "an export is what was given"
    assert not (place / words[-1]).exists() or "--out" not in words


def test_the_remedys_commands_take_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pretrained(str(place / "model")) as pretrained, pytest.raises(ModelError) as caught:
        load_model(pretrained, EncodingSettings())
    for command in ("maskfleet diagnose", "maskfleet fill", "start:"):
        assert command in caught.value.remedy
    monkeypatch.chdir(place)
    assert "Spearman" in maskfleet("diagnose", "model", "--task", "sts.yaml")
    assert "rank" in maskfleet("fill", "model", "a rank <mask> rows")
    assert "family: neobert" in maskfleet("recipe", "from", "model")
