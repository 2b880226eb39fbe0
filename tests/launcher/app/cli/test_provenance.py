"""Provenance at the command line: kept by `corpus build`, counted, found, and printed with a row."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.app.cli.main import app
from launcher.errors import OptionError
from launcher.observe.inspect.show import find_sample, render_lines
from launcher.runtime.run.record import open_run
from tests.support.checks.command import maskfleet
from tests.support.data.made_up import write_text
from tests.support.runs.small_runs import SETTINGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with a tokenizer, and the corpus that is built of them."""
    folder = tmp_path_factory.mktemp("provenance")
    write_text(folder / "lines.txt", 300)
    lines = (folder / "lines.txt").read_text("utf-8").splitlines()
    records = [
        {
            "docid": f"d{number}",
            "text": " ".join(lines[number : number + 4]),
            "l": ("CC0-1.0", "MIT")[number % 2],
        }
        for number in range(0, 280, 5)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "provenance.yaml").write_text(
        "id: docid\nlicence: l\nconstants:\n  - {source: '[red]made\x1b up'}\n".replace("\x1b", "\\e")
    )
    maskfleet("tokenizer", "train", folder / "lines.txt", "--vocab-size", "300", "--out", folder / "t")
    maskfleet(
        *("corpus", "build", folder / "in.jsonl", "--tokenizer", folder / "t", "--out", folder / "c"),
        *("--workers", "1", "--heldout", "0.1", "--provenance", folder / "provenance.yaml"),
    )
    return folder


@pytest.mark.long
def test_documents_are_counted_by_licence_and_found(folder: Path) -> None:
    table = maskfleet("corpus", "show", folder / "c", "--licences")
    assert all(licence in table for licence in ("CC0-1.0", "MIT"))
    said = maskfleet("corpus", "find", folder / "c", "--id", "d35")
    split, number = said.split(":")[0].split()
    assert "licence MIT" in said
    place = said.split(": ")[1].rsplit(", tokens", 1)[0]
    assert place in maskfleet("corpus", "show", folder / "c", "--split", split, "--index", number)
    assert CliRunner().invoke(app, ["corpus", "find", str(folder / "c"), "--id", "d36"]).exit_code == 1
    assert isinstance(CliRunner().invoke(app, ["corpus", "find", str(folder / "c")]).exception, OptionError)


def test_a_row_says_where_its_documents_come_from(folder: Path, tmp_path: Path) -> None:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    maskfleet("init", "quickstart", tmp_path / "run", "--corpus", f"text={folder / 'c'}", *settings)
    shown = find_sample(open_run(str(tmp_path / "run")), 0, 0)
    assert shown.documents
    stretches, lines = shown.source.stretches, list(render_lines(shown))
    for document, line in zip(shown.documents, lines[2:], strict=False):
        end = document.start + document.tokens
        assert any(document.start < part.stop and part.start < end for part in stretches)
        assert f"id {document.provenance.id}, " in line
        assert "\\[red]made" in line
        assert "\x1b" not in line
    tokens = sum(
        max(0, min(one.start + one.tokens, part.stop) - max(one.start, part.start))
        for one in shown.documents
        for part in stretches
    )
    assert tokens == sum(map(len, stretches))


@pytest.mark.long
def test_a_row_says_what_was_removed_from_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "c", tmp_path / "c")
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    maskfleet("init", "quickstart", tmp_path / "before", "--corpus", f"text={tmp_path / 'c'}", *settings)
    shown = find_sample(open_run(str(tmp_path / "before")), 0, 0)
    wanted = shown.documents[0].provenance.id
    (tmp_path / "ids").write_text(f"{wanted}\n")
    maskfleet("corpus", "remove", tmp_path / "c", "--ids", tmp_path / "ids", "--reason", "asked for")
    maskfleet("init", "quickstart", tmp_path / "after", "--corpus", f"text={tmp_path / 'c'}", *settings)
    after = find_sample(open_run(str(tmp_path / "after")), 0, 0)
    assert after.samples.holes is not None
    marked = [line for line in render_lines(after) if line.endswith(", removed")]
    assert len(marked) == 1
    assert f"id {wanted}, " in marked[0]
    assert any(str(len(after.samples.holes)) in line for line in render_lines(after))
    assert not any(line.endswith(", removed") for line in render_lines(shown))


@pytest.mark.parametrize(
    ("content", "named"),
    [("licens: l", "licens"), ("{", "YAML"), ("[]", "provenance"), ("may_lack: [url]", "url")],
)
def test_a_wrong_file_is_named_with_what_is_wrong(folder: Path, tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "p.yaml").write_text(content)
    command = ["corpus", "build", folder / "in.jsonl", "--tokenizer", folder / "t", "--out", tmp_path / "c"]
    for path in (tmp_path / "p.yaml", tmp_path / "none.yaml"):
        error = CliRunner().invoke(app, [*map(str, command), "--provenance", str(path)]).exception
        assert isinstance(error, OptionError)
        assert str(path) in error.problem
        if path.name == "p.yaml":
            assert named in str(error)
    assert not (tmp_path / "c").exists()
