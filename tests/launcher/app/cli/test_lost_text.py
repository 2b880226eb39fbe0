"""What a tokenizer loses of a text is said by every command on the way to a run, and most of a text is lost only by
consent.
"""

import json
from pathlib import Path
from random import Random

import pytest

from data_service.corpus.corpus import open_corpus
from data_service.errors import CorpusError, TokenizerError
from tests.support.checks.command import maskfleet


def _dna(path: Path, length: int) -> Path:
    random = Random(length)
    path.write_text("\n\n".join("".join(random.choices("ACGT", k=length)) for _ in range(400)))
    return path


def test_dna_of_which_wordpiece_knows_nothing(tmp_path: Path) -> None:
    """Words of more than 100 characters are unknown: a corpus of one token, whose loss would be 0."""
    text = _dna(tmp_path / "dna.txt", 150)
    train = ("tokenizer", "train", text, "--kind", "wordpiece", "--vocab-size", 300, "--out")
    build = (
        "corpus",
        "build",
        text,
        "--txt-documents",
        "blank_line",
        "--out",
        tmp_path / "corpus",
        "--tokenizer",
    )
    with pytest.raises(TokenizerError) as refused:
        maskfleet(*train, tmp_path / "words")
    assert "--accept-loss unknown" in str(refused.value)
    assert not (tmp_path / "words").exists()
    maskfleet(*train, tmp_path / "words", "--accept-loss", "unknown")
    with pytest.raises(TokenizerError):
        maskfleet(*build, tmp_path / "words")
    maskfleet(*build, tmp_path / "words", "--accept-loss", "unknown")
    loss = open_corpus(str(tmp_path / "corpus")).manifest.loss
    assert loss is not None
    assert loss.share("unknown") > 0.98
    with pytest.raises(CorpusError, match="UNK"):
        maskfleet("init", "roberta-base", tmp_path / "run", "--tiny", "--corpus", tmp_path / "corpus")
    assert not (tmp_path / "run").exists()


def test_dna_that_fits(tmp_path: Path) -> None:
    text = _dna(tmp_path / "dna.txt", 90)
    maskfleet("tokenizer", "train", text, "--vocab-size", 300, "--out", tmp_path / "bytes")
    build = ("corpus", "build", text, "--txt-documents", "blank_line", "--out", tmp_path / "corpus")
    maskfleet(*build, "--tokenizer", tmp_path / "bytes")
    loss = open_corpus(str(tmp_path / "corpus")).manifest.loss
    assert loss is not None
    assert loss.lost == {}
    maskfleet("init", "roberta-base", tmp_path / "run", "--tiny", "--corpus", tmp_path / "corpus")


def test_indentation_reaches_the_rows_and_its_loss_is_said(tmp_path: Path) -> None:
    code = tmp_path / "code.jsonl"
    texts = [f"def area_{i}(w):\n    if w:\n\t    return w * {i}\n\n" for i in range(300)]
    code.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for kind, lost in (("byte_bpe", 0.0), ("wordpiece", 0.25)):
        out, accept = tmp_path / kind, ("--accept-loss", "white_space")
        maskfleet("tokenizer", "train", code, "--kind", kind, "--vocab-size", 300, "--out", out, *accept)
        report = json.loads(maskfleet("tokenizer", "check", out, code, "--json"))
        assert report["loss"]["lost"].get("white_space", 0) / report["loss"]["characters"] == pytest.approx(
            lost, abs=0.05
        )
        maskfleet("corpus", "build", code, "--tokenizer", out, "--out", tmp_path / f"c-{kind}", *accept)
        stats = json.loads(maskfleet("corpus", "stats", tmp_path / f"c-{kind}", "--json"))
        assert stats["loss"]["lost"].get("white_space", 0) / stats["loss"]["characters"] == pytest.approx(
            lost, abs=0.05
        )
        (built,) = json.loads(maskfleet("corpus", "card", tmp_path / f"c-{kind}", "--json"))["built"]
        assert built["loss"] == stats["loss"]
