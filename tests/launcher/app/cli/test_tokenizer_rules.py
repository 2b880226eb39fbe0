"""A folder whose `tokenizer.json` and class disagree: every command that reads one asks, and obeys the answer."""

import json
from pathlib import Path

import pytest

from data_service.corpus.corpus import open_corpus
from data_service.errors import TokenizerError
from data_service.tokenizers.load import load_tokenizer
from tests.support.checks.command import maskfleet
from tests.support.data.made_up import write_text
from tests.support.data.tokenizer_folders import FOLDERS


@pytest.fixture
def disagreeing(tmp_path: Path) -> Path:
    """The file keeps case; the class that is named, as it is by default, does not."""
    folder = FOLDERS["saved-bert-uncased"](tmp_path)
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return folder


def test_each_command_asks_and_obeys(tmp_path: Path, disagreeing: Path) -> None:
    text, terms = tmp_path / "text.jsonl", tmp_path / "terms.txt"
    write_text(text)
    terms.write_text("qqworkerqq\n")
    accept = ("--accept-loss", "white_space", "--accept-loss", "unknown")
    commands = {
        "check": ("tokenizer", "check", disagreeing, text),
        "extend": ("tokenizer", "extend", disagreeing, tmp_path / "extended", "--terms", terms, "--replace"),
        "build": ("corpus", "build", text, "--tokenizer", disagreeing, *accept, "--out"),
    }
    for name, command in commands.items():
        place = (tmp_path / "corpus",) if name == "build" else ()
        with pytest.raises(TokenizerError) as asked:
            maskfleet(*command, *place)
        assert "BertTokenizer" in str(asked.value)
        for rules in ("file", "class"):
            assert f"--tokenizer-rules {rules}" in str(asked.value)
            maskfleet(*command, *((tmp_path / f"corpus-{rules}",) if place else ()), "--tokenizer-rules", rules)
            if name == "extend":
                cased = load_tokenizer(str(tmp_path / "extended"), "agreeing").normalize("The") == "The"
                assert cased == (rules == "file")
    hashes = {rules: open_corpus(str(tmp_path / f"corpus-{rules}")).tokenizer().hash for rules in ("file", "class")}
    for rules, used in hashes.items():
        assert load_tokenizer(str(disagreeing), rules).hash == used  # type: ignore[arg-type]
        run = tmp_path / f"run-{rules}"
        maskfleet("init", "roberta-base", run, "--tiny", "--corpus", tmp_path / f"corpus-{rules}")
