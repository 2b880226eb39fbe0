"""`maskfleet tokenizer train` and `extend` write over no tokenizer unless they are told to."""

import json
from pathlib import Path

import pytest

from data_service.errors import TokenizerError
from data_service.tokenizers.load import load_tokenizer
from launcher.errors import OptionError
from tests.support.checks.command import maskfleet
from tests.support.data.made_up import write_text


def test_a_tokenizer_is_written_over_only_if_told(tmp_path: Path) -> None:
    text, out, terms = tmp_path / "text.jsonl", tmp_path / "out", tmp_path / "terms.txt"
    write_text(text)
    terms.write_text("neurotransmitter\n")
    train = ("tokenizer", "train", text, "--out", out, "--vocab-size")
    maskfleet(*train, 300)
    assert load_tokenizer(str(out)).vocab_size == 300
    with pytest.raises(TokenizerError, match=r"/out\b.*\n.*--replace"):
        maskfleet(*train, 310)
    with pytest.raises(TokenizerError, match="already"):
        maskfleet("tokenizer", "extend", out, out, "--terms", terms)
    assert load_tokenizer(str(out)).vocab_size == 300
    maskfleet(*train, 310, "--replace")
    assert load_tokenizer(str(out)).vocab_size == 310
    maskfleet("tokenizer", "extend", out, out, "--terms", terms, "--replace")
    assert load_tokenizer(str(out)).vocab_size == 312


def test_an_extension_says_what_it_adds(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    maskfleet("tokenizer", "train", tmp_path / "text.jsonl", "--out", tmp_path / "old", "--vocab-size", 300)
    with pytest.raises(OptionError):
        maskfleet("tokenizer", "extend", tmp_path / "old", tmp_path / "new")
    maskfleet("tokenizer", "extend", tmp_path / "old", tmp_path / "new", "--specials")  # it lacks none
    assert load_tokenizer(str(tmp_path / "new")).hash == load_tokenizer(str(tmp_path / "old")).hash


def test_a_published_vocabulary_is_not_mixed_with_a_new_one(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    with pytest.raises(TokenizerError, match="already"):
        maskfleet("tokenizer", "train", tmp_path / "text.jsonl", "--out", tmp_path, "--vocab-size", 300)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.jsonl", "vocab.txt"]


@pytest.mark.parametrize("kind", ["byte_bpe", "wordpiece", "unigram", "bpe"])
def test_a_vocabulary_is_as_large_as_the_text_supports(tmp_path: Path, kind: str) -> None:
    """Whether a size was asked for or not."""
    write_text(tmp_path / "text.jsonl", 3)
    for size in ((), ("--vocab-size", 40_000)):
        maskfleet(
            "tokenizer",
            "train",
            tmp_path / "text.jsonl",
            "--out",
            tmp_path / f"t{len(size)}",
            "--kind",
            kind,
            *size,
        )
    default, asked = (load_tokenizer(str(tmp_path / f"t{number}")) for number in (0, 2))
    assert default.pieces == asked.pieces
    assert asked.vocab_size < 40_000


def test_words_that_were_left_out_are_said_and_stay_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "text.jsonl")
    train = ("tokenizer", "train", tmp_path / "text.jsonl", "--vocab-size", 270, "--out")
    assert "Left out" not in maskfleet(*train, tmp_path / "all")
    monkeypatch.setattr("data_service.tokenizers.train.MAX_TRAINING_WORD_BYTES", 60)
    said = maskfleet(*train, tmp_path / "frequent")
    every, frequent = (
        json.loads((tmp_path / name / "training_report.json").read_bytes()) for name in ("all", "frequent")
    )
    assert f"{frequent['left_out'] / frequent['words']:.2%}" in said
    assert every["words"] == frequent["words"] > frequent["left_out"] > every["left_out"] == 0
