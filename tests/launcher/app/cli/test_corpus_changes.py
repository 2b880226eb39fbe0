"""Documents are taken out of a corpus at the command line, and the commands that show it say so."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_service.errors import CorpusError, InputError
from launcher.app.cli.main import app
from launcher.errors import OptionError
from launcher.runtime.run.record import open_run
from tests.support.checks.command import maskfleet
from tests.support.data.made_up import write_text

WHY = ("--reason", "asked [red]for\x1b it")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A corpus of documents d0 to d59."""
    write_text(tmp_path / "lines.txt", 240)
    lines = (tmp_path / "lines.txt").read_text("utf-8").splitlines()
    records = [{"docid": f"d{n}", "text": " ".join(lines[4 * n : 4 * n + 4])} for n in range(60)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "provenance.yaml").write_text("id: docid\n")
    maskfleet("tokenizer", "train", tmp_path / "lines.txt", "--vocab-size", "300", "--out", tmp_path / "t")
    maskfleet(
        *("corpus", "build", tmp_path / "in.jsonl", "--tokenizer", tmp_path / "t", "--out", tmp_path / "c"),
        *("--workers", "1", "--heldout", "0.1", "--provenance", tmp_path / "provenance.yaml"),
    )
    return tmp_path / "c"


def listed(folder: Path, text: str) -> Path:
    (folder / "list.txt").write_text(text, "utf-8")
    return folder / "list.txt"


@pytest.mark.long
def test_documents_are_removed_and_told(corpus: Path, tmp_path: Path) -> None:
    maskfleet("corpus", "remove", corpus, "--ids", listed(tmp_path, "\ufeffd35\r\n\n"), *WHY)
    split, number = maskfleet("corpus", "find", corpus, "--id", "d35").split(":")[0].split()
    again = listed(tmp_path, f"{split}:{number}\n{split}:{int(number) + 1}\n")
    said = json.loads(maskfleet("corpus", "remove", corpus, "--documents", again, *WHY, "--json"))
    assert said["tokens"] > 0
    assert {**said, "tokens": 0} == {"removal": 2, "documents": 1, "tokens": 0, "removed_before": 1}
    said = json.loads(maskfleet("corpus", "remove", corpus, "--documents", again, *WHY, "--json"))
    assert said == {"removal": None, "documents": 0, "tokens": 0, "removed_before": 2}
    shown = maskfleet("corpus", "show", corpus, "--split", split, "--index", number, "--count", 3)
    heads = [line for line in shown.splitlines() if line.startswith("== ")]
    assert ["removal 1" in heads[0], "removal 2" in heads[1], "removal" in heads[2]] == [True, True, False]
    assert shown.splitlines()[:2] == heads[:2]  # without their text
    told = maskfleet("corpus", "show", corpus, "--removed")
    assert f"{split} {number}:" in told
    assert "[red]" in told
    assert "\x1b" not in told
    assert "removal 1" in maskfleet("corpus", "find", corpus, "--id", "d35")
    (note,) = (line for line in maskfleet("corpus", "stats", corpus).splitlines() if "--removed" in line)
    assert "2 documents" in note
    assert "0 damaged" in maskfleet("corpus", "verify", corpus)


@pytest.mark.long
def test_mistakes_change_nothing(corpus: Path, tmp_path: Path) -> None:
    known, unknown = listed(tmp_path, "d1\n"), tmp_path / "unknown.txt"
    unknown.write_text("d1\nd77\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.txt").write_text("\n \n")
    mistakes: list[tuple[list[object], type[Exception], str]] = [
        (["--ids", known, "--reason", " "], OptionError, "--reason"),
        ([*WHY], OptionError, "--from-parts"),
        (["--ids", known, "--documents", known, *WHY], OptionError, "--from-parts"),
        (["--ids", unknown, *WHY], CorpusError, "d77"),
        (["--documents", known, *WHY], CorpusError, "d1"),
        (["--ids", tmp_path / "gone.txt", *WHY], InputError, "gone.txt"),
        (["--ids", tmp_path / "bytes.txt", *WHY], InputError, "bytes.txt"),
        (["--ids", tmp_path / "empty.txt", *WHY], InputError, "empty.txt"),
    ]
    for options, kind, named in mistakes:
        error = CliRunner().invoke(app, ["corpus", "remove", str(corpus), *map(str, options)]).exception
        assert isinstance(error, kind)
        assert named in str(error)
    assert not (corpus / "removals").exists()


@pytest.mark.long
def test_corpora_are_merged(corpus: Path, tmp_path: Path) -> None:
    maskfleet("corpus", "remove", corpus, "--ids", listed(tmp_path, "d35\n"), *WHY)
    lines = (tmp_path / "lines.txt").read_text("utf-8").splitlines()
    records = [{"docid": f"e{n}", "text": " ".join(lines[4 * n + 2 : 4 * n + 6])} for n in range(58)]
    copied = {"docid": "copied", "text": " ".join(lines[80:84])}  # d20
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*records, copied]))
    maskfleet(
        *(
            "corpus",
            "build",
            tmp_path / "in.jsonl",
            "--tokenizer",
            tmp_path / "t",
            "--out",
            tmp_path / "other",
        ),
        *("--workers", "1", "--heldout-like", corpus, "--provenance", tmp_path / "provenance.yaml"),
    )
    command = ("corpus", "merge", corpus, tmp_path / "other", "--out", tmp_path / "merged", "--json")
    said = json.loads(maskfleet(*command))
    assert said == {"documents": 119, "copies": 1, "earlier_copies": 0, "removed": 1}
    assert "removal 1" in maskfleet("corpus", "find", tmp_path / "merged", "--id", "d35")
    assert "removal 2" in maskfleet("corpus", "find", tmp_path / "merged", "--id", "copied")
    assert "0 damaged" in maskfleet("corpus", "verify", tmp_path / "merged")
    assert "119" in maskfleet("corpus", "stats", tmp_path / "merged")
    appended = ("corpus", "append", corpus, tmp_path / "in.jsonl", "--out", tmp_path / "grown", "--json")
    said = json.loads(maskfleet(*appended).splitlines()[-1])
    assert said == {"added": 59, "copies": 1, "earlier_copies": 0, "documents": 119, "removed": 1}
    assert json.loads(maskfleet(*appended).splitlines()[-1]) == said
    assert "e7" in maskfleet("corpus", "find", tmp_path / "grown", "--id", "e7")
    run = tmp_path / "run"
    maskfleet("init", "quickstart", run, "--corpus", tmp_path / "merged", "--tiny")
    assert open_run(str(run)).removals
    maskfleet("corpus", "remove", corpus, "--ids", listed(tmp_path, "d36\n"), *WHY)
    new = ["init", "quickstart", str(tmp_path / "new"), "--corpus", str(tmp_path / "merged"), "--tiny"]
    refused = CliRunner().invoke(app, new).exception
    assert isinstance(refused, CorpusError)
    assert "--from-parts" in refused.remedy
    maskfleet("corpus", "remove", tmp_path / "merged", "--from-parts", *WHY)
    assert "removal 3" in maskfleet("corpus", "find", tmp_path / "merged", "--id", "d36")
    maskfleet(*new)
    assert isinstance(CliRunner().invoke(app, [*map(str, command)]).exception, CorpusError)
