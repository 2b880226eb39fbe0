"""What is held out of text of any shape: enough, never on both sides, and by content alone."""

import gzip
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.corpus.manifest import HeldoutRule
from data_service.errors import InputError
from data_service.ingest.heldout import (
    MAX_HELDOUT_CANDIDATES,
    DocumentFigures,
    heldout_rule_by_documents,
    heldout_rule_by_stretches,
    low_word,
    mean_stretch_bytes,
    split_heldout_parts,
    split_into_stretches,
    target_heldout_bytes,
)
from data_service.ingest.options import BuildOptions
from data_service.ingest.scan import hash_texts
from data_service.store.open import open_store
from data_service.stream.statistics import corpus_stats
from tests.support.data.raw_text import DOCUMENTS, build, decoded_documents, files_of, write_jsonl

FRACTION = 0.0005  # the default


def prose(seed: int, size: int) -> str:
    """Paragraphs of made-up sentences, no two alike, about `size` bytes."""
    draw, paragraphs, length = random.Random(seed), list[str](), 0
    while length < size:
        sentences = [
            " ".join(f"w{draw.randrange(400)}" for _ in range(draw.randint(4, 14))).capitalize() + "."
            for _ in range(draw.randint(1, 6))
        ]
        paragraphs.append(" ".join(sentences))
        length += len(paragraphs[-1]) + 2
    return "\n\n".join(paragraphs)


def chinese(seed: int, size: int) -> str:
    draw = random.Random(seed)
    lines = (
        "".join(chr(0x4E00 + draw.randrange(500)) for _ in range(draw.randint(5, 40))) + "。" for _ in range(size // 66)
    )
    return "".join(lines)


def write_kind(folder: Path, kind: str, size: int = 150_000) -> Path:
    """Text of one kind in a folder; its path."""
    folder.mkdir()
    one = prose(1, size)
    match kind:
        case "one text":
            (folder / "a.txt").write_text(one)
        case "one line without sentences":
            (folder / "a.txt").write_text(" ".join(one.replace(".", "").split()))
        case "Chinese":
            (folder / "a.txt").write_text(chinese(1, size))
        case "compressed":
            (folder / "a.txt.gz").write_bytes(gzip.compress(one.encode()))
        case "lines":
            write_jsonl(folder / "a.jsonl", [prose(seed, 300) for seed in range(size // 300)])
    return folder


KINDS = ("one text", "one line without sentences", "Chinese", "compressed", "lines")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_text_of_any_kind_has_some_held_out_and_none_of_it_is_trained_on(tmp_path: Path, kind: str) -> None:
    source = write_kind(tmp_path / "inputs", kind)
    manifest = build(source, tmp_path / "corpus", BuildOptions())
    train = decoded_documents(open_store(tmp_path / "corpus"), manifest.train)
    heldout = decoded_documents(open_store(tmp_path / "corpus"), manifest.heldout)
    share = manifest.heldout.tokens.sum() / (manifest.heldout.tokens.sum() + manifest.train.tokens.sum())
    assert 0.02 < share < 0.12
    assert manifest.heldout_rule is not None
    assert manifest.heldout_rule.unit == ("document" if kind == "lines" else "stretch")
    everything = "\n".join(train)
    assert not [text for text in heldout if text.strip() in everything]
    assert corpus_stats(str(tmp_path / "corpus")).heldout_rule == manifest.heldout_rule


@pytest.mark.long
def test_what_is_held_out_is_a_matter_of_content_alone(tmp_path: Path) -> None:
    """Whatever the files, their order, the splits, the blocks, and which of two copies comes first."""
    texts = [prose(seed, 30_000) for seed in range(3)]
    copies = [text.replace("\n\n", " \r\n \r\n") for text in texts]
    one = write_jsonl(tmp_path / "one/a.jsonl", texts + copies).parent
    for name, text in zip("zyxabc", texts + copies, strict=True):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / f"other/{name}.txt").write_bytes(text.encode())
    held: list[tuple[HeldoutRule | None, list[str]]] = []
    for name, source in (("a", one), ("b", tmp_path / "other")):
        options = BuildOptions(split_bytes=5000, block_tokens=2000 + 1000 * len(held))
        manifest = build(source, tmp_path / name, options)
        held.append((manifest.heldout_rule, sorted(decoded_documents(open_store(tmp_path / name), manifest.heldout))))
    assert held[0][1]
    assert held[0] == held[1]


@pytest.mark.long
def test_enough_documents_are_held_out_as_they_are_and_the_manifest_says_no_more(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "inputs/a.jsonl", DOCUMENTS)
    manifest = build(tmp_path / "inputs", tmp_path / "corpus", BuildOptions(heldout_fraction=0.1))
    assert manifest.heldout_rule is None
    assert b"heldout_rule" not in files_of(tmp_path / "corpus")["manifest.json"]
    expected = [text for text in DOCUMENTS if low_word(hash_texts([text])) < 0.1 * 2.0**64]
    assert manifest.heldout.documents.sum() == len(expected)


def test_copies_and_workers_change_nothing(tmp_path: Path) -> None:
    source = write_kind(tmp_path / "inputs", "one text", 40_000)
    manifest = build(source, tmp_path / "corpus", BuildOptions())
    text = (source / "a.txt").read_text()
    for number in range(4):
        (source / f"copy-{number}.txt").write_text(text)
    again = build(source, tmp_path / "again", BuildOptions())
    assert again.heldout_rule == manifest.heldout_rule
    assert again.fingerprint == manifest.fingerprint


def measured(texts: list[str], fraction: float) -> DocumentFigures:
    found = sorted((low_word(hash_texts([text])), len(text.encode())) for text in set(texts))
    held = [size for low, size in found if low < fraction * 2.0**64]
    return DocumentFigures(
        len(found), sum(size for _, size in found), len(held), sum(held), found[:MAX_HELDOUT_CANDIDATES]
    )


def settled(texts: list[str], fraction: float) -> HeldoutRule:
    """As a build does, over all texts at once."""
    found = measured(texts, fraction)
    rule = heldout_rule_by_documents(found, fraction)
    if rule is not None:
        return rule
    sizes: Counter[int] = Counter()
    for text in set(texts):
        for stretch, end in split_into_stretches(text, mean_stretch_bytes(found.size, fraction)):
            if end is not None:
                sizes[end] += len(stretch.encode())
    return heldout_rule_by_stretches(sizes, found.size, fraction)


PARAGRAPHS = st.sampled_from([prose(seed, draw) for seed, draw in enumerate([20, 60, 150, 400, 1500] * 12)])
TEXTS = st.lists(st.lists(PARAGRAPHS, min_size=1, max_size=25).map("\n\n".join), min_size=1, max_size=12)


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(texts=TEXTS, fraction=st.sampled_from([0.0005, 0.02, 0.2]))
def test_shared_paragraphs_never_put_a_held_out_stretch_into_training(texts: list[str], fraction: float) -> None:
    try:
        rule = settled(texts, fraction)
    except InputError:
        return  # too little for any
    assert rule == settled(texts[::-1], fraction)
    parts = [part for text in dict.fromkeys(texts) for part in split_heldout_parts(rule, text, hash_texts([text]))]
    train = [f"\n\n{text}\n\n" for text, heldout in parts if not heldout]
    kept = [text for text, heldout in parts if heldout]
    assert train
    assert kept
    if rule.unit == "stretch":
        alone = [
            stretch.strip()
            for text in kept
            for stretch, end in split_into_stretches(text, rule.length)
            if end is not None and rule.holds_out(end)
        ]
        assert not [text for text in alone if any(f"\n\n{text}\n\n" in other for other in train)]
        assert sum(len(text) for text in train) >= sum(map(len, kept))


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=400) | st.text("ab. \n。", max_size=3000), length=st.integers(1, 200))
def test_stretches_laid_end_to_end_are_the_text(text: str, length: int) -> None:
    joined = "".join(stretch for stretch, _ in split_into_stretches(text, length))
    assert "".join(joined.split()) == "".join(text.split())


@pytest.mark.parametrize("count", [1, 2, 30, 3000])
@pytest.mark.parametrize("size", [40, 2_000, 60_000])
def test_the_amount_is_about_what_is_wanted(count: int, size: int) -> None:
    if count * size > 10_000_000 or count * size < 200:
        return
    texts = [prose(seed, size) for seed in range(count)]
    rule = settled(texts, FRACTION)
    parts = [part for text in texts for part in split_heldout_parts(rule, text, hash_texts([text]))]
    held = sum(len(text.encode()) for text, heldout in parts if heldout)
    total = sum(len(text.encode()) for text in texts)
    wanted = target_heldout_bytes(total, FRACTION)
    assert wanted / 2 <= held <= max(3 * wanted, total / 10)


def test_a_separator_of_all_stretches_is_trained_on() -> None:
    """A line that ends very many stretches would take half of the text with it."""
    line = "\n\n" + "* " * 40
    texts = [line.join(prose(seed * 100 + part, 700) for part in range(60)) for seed in range(2)]
    for fraction in (FRACTION, 0.01, 0.1):
        rule = settled(texts, fraction)
        parts = [part for text in texts for part in split_heldout_parts(rule, text, hash_texts([text]))]
        held = sum(len(text) for text, heldout in parts if heldout)
        assert held <= 3 * target_heldout_bytes(sum(map(len, texts)), fraction)


def test_a_long_line_that_was_shifted_is_cut_at_the_same_places() -> None:
    line = " ".join(prose(5, 60_000).replace(".", "").split())
    first = [text for text, _ in split_into_stretches(line, 2000)]
    second = [text for text, _ in split_into_stretches("One more word " + line, 2000)]
    assert len(first) > 10
    assert first[1:] == second[1:]
