"""The language of a document by a fastText model that is given as a file: what it finds, and what is refused."""

import hashlib
import struct
from pathlib import Path
from typing import Any

import pytest

from data_service.errors import PrepareError
from data_service.prepare.documents import Document, DropDecision
from data_service.prepare.language import Language, make_language_filter

WORDS = {"en": ("the", "and", "with"), "de": ("der", "und", "mit")}


def write_model(path: Path) -> str:
    """A fastText model of six words and two labels, in its own format; return its SHA-256."""
    words = [(word, place) for place, group in enumerate(WORDS.values()) for word in group]
    labels = [f"__label__{name}" for name in WORDS]
    data = struct.pack("<ii", 793712314, 12)
    # dim ws epoch minCount neg wordNgrams loss=softmax model=supervised bucket minn maxn lrUpdateRate, t
    data += struct.pack("<12id", 2, 5, 5, 1, 5, 1, 3, 3, 0, 0, 0, 100, 1e-4)
    data += struct.pack("<iiiqq", len(words) + 2, len(words), 2, 100, -1)
    data += b"".join(word.encode() + b"\0" + struct.pack("<qb", 10, 0) for word, _ in words)
    data += b"".join(label.encode() + b"\0" + struct.pack("<qb", 30, 1) for label in labels)
    vectors = [value for _, place in words for value in ((4.0, -4.0) if place == 0 else (-4.0, 4.0))]
    data += struct.pack("<?qq", False, len(words), 2) + struct.pack(f"<{len(vectors)}f", *vectors)
    data += struct.pack("<?qq", False, 2, 2) + struct.pack("<4f", 1.0, 0.0, 0.0, 1.0)
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def decided(path: Path, text: str, sha256: str, **settings: Any) -> Document | DropDecision:
    stage = Language(stage="language", model=str(path), sha256=sha256, **settings)
    return make_language_filter(stage)(Document("a", text, "s", language="said"))


def test_the_language_is_found_and_written(tmp_path: Path) -> None:
    pytest.importorskip("fasttext", reason="needs maskfleet[prepare]")
    sha256 = write_model(tmp_path / "lid.bin")
    text = "the dog\nand the cat"
    found = decided(tmp_path / "lid.bin", text, sha256)
    assert isinstance(found, Document)
    assert (found.language, found.text) == ("en", text)
    other = decided(tmp_path / "lid.bin", "der Hund und", sha256, languages=("en",))
    assert isinstance(other, DropDecision)
    assert (other.reason, other.detail[:2]) == ("other_language", "de")


def test_text_in_no_language_or_in_two_is_dropped(tmp_path: Path) -> None:
    pytest.importorskip("fasttext", reason="needs maskfleet[prepare]")
    sha256 = write_model(tmp_path / "lid.bin")
    for text in ("☃ ☃☃ 12", "the der and und"):
        found = decided(tmp_path / "lid.bin", text, sha256)
        assert isinstance(found, DropDecision)
        assert found.reason in ("unsure", "no_language")


def test_a_missing_model_and_one_of_another_hash_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=r"lid\.bin"):
        decided(tmp_path / "lid.bin", "the", "0" * 64)
    sha256 = write_model(tmp_path / "lid.bin")
    with pytest.raises(PrepareError, match=sha256):
        decided(tmp_path / "lid.bin", "the", "1" * 64)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("fasttext", reason="needs maskfleet[prepare]")
    (tmp_path / "text.bin").write_bytes(b"no model at all")
    with pytest.raises(PrepareError, match=r"text\.bin"):
        decided(tmp_path / "text.bin", "the", hashlib.sha256(b"no model at all").hexdigest())
