"""`corpus prepare`: mistakes in its file by line, its tables, and the same bytes however often it is killed."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_service.errors import PrepareError
from data_service.prepare.configuration import Preparation
from launcher.app.cli.main import app
from launcher.app.cli.prepared import PREPARATION_WORDING
from launcher.app.cli.texts import read_settings
from tests.support.data.raw_text import DOCUMENTS

PREPARATION = """
inputs:
  - source: topics
    files: [{folder}/topics.jsonl]
    fields: {{id: name}}
    constants: {{licence: PSF-2.0}}
stages:
  - stage: length
    least_characters: 300
  - stage: exact_duplicates
chunk_bytes: 50000
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    texts = [*DOCUMENTS, *DOCUMENTS[:10]]
    lines = [json.dumps({"text": text, "name": f"t{i}"}) + "\n" for i, text in enumerate(texts)]
    (tmp_path / "topics.jsonl").write_text("".join(lines), "utf-8")
    (tmp_path / "prepare.yaml").write_text(PREPARATION.format(folder=tmp_path), "utf-8")
    return tmp_path / "prepare.yaml"


@pytest.mark.long
def test_the_tables_and_the_object_say_the_same(file: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["corpus", "prepare", str(file), str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    again = CliRunner().invoke(app, ["corpus", "prepare", str(file), str(tmp_path / "out"), "--json"])
    (line,) = again.stdout.splitlines()
    found = json.loads(line)
    assert found == json.loads((tmp_path / "out/statistics.json").read_text("utf-8"))
    assert f"{found['documents_kept']:,}" in shown.output
    assert found["stages"][2]["dropped"] == {"copy": 9}
    assert "PSF-2.0" in shown.output


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("stage: length", "stage: lenght", "prepare.yaml:8"),
        ("least_characters: 300", "least_characters: -1", "prepare.yaml:9"),
        ("least_characters: 300", "least: 1", "prepare.yaml:9"),
        ("fields: {id: name}", "fields: {identity: name}", "prepare.yaml:5"),
        ("source: topics", "sauce: topics", "prepare.yaml:3"),
    ],
)
def test_mistakes_in_the_file_are_named_by_line(file: Path, old: str, new: str, place: str) -> None:
    file.write_text(file.read_text("utf-8").replace(old, new), "utf-8")
    with pytest.raises(PrepareError, match=place):
        read_settings(str(file), Preparation, PREPARATION_WORDING)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=r"none\.yaml"):
        read_settings(str(tmp_path / "none.yaml"), Preparation, PREPARATION_WORDING)
