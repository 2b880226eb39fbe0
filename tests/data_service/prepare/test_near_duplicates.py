"""Near duplicates over all inputs, held to statements that look at all pairs."""

import random
import time
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.prepare.clusters import flatten_trees, unite_components
from data_service.prepare.minhash import HASH_COUNT, SKETCH_BYTES, choose_bands, compute_signature
from data_service.prepare.near_duplicates import find_pairs
from data_service.prepare.shingles import MAX_UNIT_LETTERS, hash_shingles
from data_service.tokenizers.words import LETTERS_WITHOUT_SPACES
from tests.support.data.preparations import made_up_texts, rows_of, run, with_word_changed, write_texts

NEAR = {"stage": "near_duplicates"}
ALPHABETS = ("abcdefgh", "абвгдежз", "百日紅花見鳥語空", "กขคงจฉชซ", "あいうえおアイウ", "𝒜𐤀ꓐꯀ", "é̂ạöüñ")


@pytest.mark.long
def test_of_similar_texts_of_all_sources_the_first_is_kept_and_stands_for_all(tmp_path: Path) -> None:
    """The second source holds near copies of the first, of itself, and equal texts."""
    drawn, whole = random.Random(5), tmp_path / "whole"
    texts = made_up_texts(150, 90, drawn)
    first = [*texts[:100], *(with_word_changed(text, drawn) for text in texts[:30]), texts[3], texts[3]]
    second = [*(with_word_changed(text, drawn) for text in texts[10:50]), *texts[100:], *texts[90:110]]
    second += [with_word_changed(text, drawn) for text in texts[130:]]
    sources = [write_texts(tmp_path / "first.jsonl", first), write_texts(tmp_path / "second.jsonl", second)]
    run(sources, [{"stage": "exact_duplicates"}, NEAR], whole)
    kept, dropped = rows_of(whole / "documents"), rows_of(whole / "dropped")
    assert len(kept) == 150
    assert sum(row["cluster_size"] for row in kept) == len(kept) + len(dropped)
    near = [row for row in dropped if row["stage"] == "near_duplicates"]
    assert {row["reason"] for row in near} == {"near_copy"}
    sizes = {row["id"]: row["cluster_size"] for row in kept}
    assert all(sizes[row["detail"].removeprefix("near copy of ")] > 1 for row in near)
    order = {name: place for place, name in enumerate(sizes)}
    assert [row["id"] for row in kept] == sorted(sizes, key=order.__getitem__)
    assert sum(name.startswith("first") for name in sizes) == 100
    assert sizes["first-3"] == 4
    assert sizes["first-20"] == 3


@pytest.mark.long
def test_planted_near_copies_are_found_and_little_else_is_dropped(tmp_path: Path) -> None:
    """By the similarity of the documents' shingles."""
    drawn = random.Random(1)
    texts = made_up_texts(400, 120, drawn)
    copies: dict[str, Callable[[str], str]] = {
        "word": lambda text: with_word_changed(text, drawn),
        "line": lambda text: f"Posted on day {drawn.random()}\n{text}",
        "sentence": lambda text: f"{text} {drawn.choice(texts)[:80]}.",
        "twentieth": lambda text: " ".join(
            word if drawn.random() > 0.05 else f"new{drawn.random()}" for word in text.split()
        ),
        "half": lambda text: text[: len(text) // 2],
    }
    sources = {"origin": texts} | {kind: [copy(text) for text in texts[:100]] for kind, copy in copies.items()}
    run([write_texts(tmp_path / f"{name}.jsonl", its) for name, its in sources.items()], [NEAR], tmp_path / "out")
    shingles = {
        f"{name}-{i}": set(hash_shingles(text, 5).tolist())
        for name, its in sources.items()
        for i, text in enumerate(its)
    }

    def similarity(one: str, other: str) -> float:
        return len(shingles[one] & shingles[other]) / len(shingles[one] | shingles[other])

    dropped = {row["id"]: row["detail"].removeprefix("near copy of ") for row in rows_of(tmp_path / "out/dropped")}
    similar = [f"{kind}-{i}" for kind in copies for i in range(100) if similarity(f"{kind}-{i}", f"origin-{i}") >= 0.8]
    assert len(similar) > 300
    assert sum(name in dropped for name in similar) > 0.95 * len(similar)
    for kind in ("word", "line", "sentence"):
        assert sum(f"{kind}-{i}" in dropped for i in range(100)) > 97
    found = [similarity(*pair) for pair in dropped.items()]
    assert min(found) > 0.4
    assert np.mean([value >= 0.7 for value in found]) > 0.85


@pytest.mark.long
def test_ten_thousand_times_the_copies_take_as_many_times_as_long(tmp_path: Path) -> None:
    drawn = random.Random(2)
    page = made_up_texts(1, 60, drawn)[0]
    seconds = {}
    for count in (10_000, 1_000_000):
        copies = (page if number % 2 else with_word_changed(page, drawn) for number in range(count))
        source = write_texts(tmp_path / f"pages{count}.jsonl", list(copies))
        began = time.process_time()
        statistics = run([source], [NEAR], tmp_path / f"out{count}", chunk=16 << 20)
        seconds[count] = time.process_time() - began
        assert statistics.documents_kept == 1
        (kept,) = rows_of(tmp_path / f"out{count}" / "documents")
        assert kept["cluster_size"] == count
    assert seconds[1_000_000] < 150 * seconds[10_000], seconds


# ----- parts


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(1, 60))
def test_clusters_are_the_connected_components(data: st.DataObject, count: int) -> None:
    numbers = st.integers(0, count - 1)
    batches = data.draw(st.lists(st.lists(st.tuples(numbers, numbers), min_size=1), max_size=6))
    parents = np.arange(count, dtype=np.uint32)
    expected = [{number} for number in range(count)]
    for batch in batches:
        unite_components(parents, np.array(batch, dtype=np.int64))
        for one, other in batch:
            both = expected[one] | expected[other]
            for member in both:
                expected[member] = both
    flatten_trees(parents)
    assert parents.tolist() == [min(expected[number]) for number in range(count)]


@pytest.mark.parametrize("shape", ["chain", "backwards", "star", "shuffled"])
def test_long_chains_are_joined_at_once(shape: str) -> None:
    count = 200_000
    numbers = np.arange(count)
    pairs = np.stack((numbers[:-1], numbers[1:]), axis=1)
    if shape == "backwards":
        pairs = pairs[::-1, ::-1]
    if shape == "star":
        pairs = np.stack((np.full(count - 1, count - 1), numbers[:-1]), axis=1)
    if shape == "shuffled":
        pairs = np.random.default_rng(0).permutation(pairs)
    parents = np.arange(count, dtype=np.uint32)
    for start in range(0, len(pairs), 40_000):
        unite_components(parents, pairs[start : start + 40_000])
    flatten_trees(parents)
    assert not parents.any()


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.integers(0, 4), max_size=40),
    seed=st.integers(0, 2**32 - 1),
    flips=st.integers(0, 30),
)
def test_pairs_are_the_first_of_each_group_and_what_is_similar_to_it(keys: list[int], seed: int, flips: int) -> None:
    drawn = np.random.default_rng(seed)
    centres = drawn.integers(0, 2, (3, HASH_COUNT), dtype=np.uint8)
    bits = centres[drawn.integers(0, 3, len(keys))]
    bits = bits ^ (drawn.random(bits.shape) < flips / HASH_COUNT / 2)
    sketches = np.packbits(bits, axis=1).reshape(len(keys), SKETCH_BYTES)
    numbers = np.sort(drawn.choice(1000, len(keys), replace=False))
    least = HASH_COUNT - flips
    expected = set()
    for key in set(keys):
        group = [row for row, each in enumerate(sorted(keys)) if each == key]
        while group:
            similar = [row for row in group if (bits[row] == bits[group[0]]).sum() >= least]
            expected |= {(int(numbers[group[0]]), int(numbers[row])) for row in similar[1:]}
            group = [row for row in group if row not in similar]
    found = find_pairs(np.array(sorted(keys), dtype=np.uint64), numbers, sketches, least)
    assert Counter(map(tuple, found.tolist())) == Counter(expected)


def test_a_million_documents_of_one_band_are_compared_in_linear_time() -> None:
    drawn = np.random.default_rng(3)
    count = 100_000
    sketches = drawn.integers(0, 256, (count, SKETCH_BYTES), dtype=np.uint8)
    began = time.process_time()
    assert len(find_pairs(np.zeros(count, dtype=np.uint64), np.arange(count), sketches, 100)) < count
    assert time.process_time() - began < 5


def units_of(text: str) -> list[str]:
    """The units, found character by character."""
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    units, inside = list[str](), False
    for character in plain:
        if unicodedata.category(character)[0] not in "LNM":
            inside = False
            continue
        if not inside or any(low <= ord(character) <= high for low, high in LETTERS_WITHOUT_SPACES):
            units.append("")
        units[-1] += character
        inside = True
    units = [part for unit in units for part in (unit if len(unit) > MAX_UNIT_LETTERS else [unit])]
    return units or [character for character in plain if not character.isspace()]


TEXTS = st.lists(
    st.sampled_from([*"".join(ALPHABETS), *" \n.,-!", "Ab", "a" * 40, "\uff11", "\ufb01", "\ud800"]),
    max_size=60,
).map("".join)


@settings(max_examples=120, deadline=None)
@given(one=TEXTS, other=TEXTS, words=st.integers(1, 6))
def test_shingles_are_equal_where_runs_of_units_are(one: str, other: str, words: int) -> None:
    found, runs = list[int](), list[tuple[str, ...]]()
    for text in (one, other):
        units = units_of(text)
        span = min(words, len(units))
        here = [tuple(units[start : start + span]) for start in range(len(units) - span + 1)] if units else []
        hashes = hash_shingles(text, words).tolist()
        assert len(hashes) == len(here)
        found, runs = found + hashes, runs + here
    assert len(set(found)) == len(set(runs)) == len(set(zip(found, runs, strict=True)))


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_texts_of_any_alphabet_are_near_copies_though_one_character_differs(alphabet: str) -> None:
    drawn = random.Random(alphabet)
    for spaces in ("", " "):
        letters = [character for character in alphabet if character.isalpha()] + [spaces]
        text = "".join(drawn.choices(letters, k=600))
        place = drawn.randrange(600)
        one, other, strange = (
            compute_signature(each, 5)
            for each in (
                text,
                text[:place] + "x" + text[place + 1 :],
                "".join(drawn.choices(letters, k=600)),
            )
        )
        least = choose_bands(0.8).least_equal

        def equal(a: Any, b: Any) -> int:
            return HASH_COUNT - int(np.bitwise_count(a.sketch() ^ b.sketch()).sum())

        assert equal(one, other) >= least
        assert equal(one, strange) < least
        assert (one.band_keys(choose_bands(0.8)) == other.band_keys(choose_bands(0.8))).any()


def test_case_and_unicode_forms_make_no_difference() -> None:
    """Forms can hide capitals (`™` is TM, a bold one is H), and folding case can make other forms."""
    drawn = random.Random(7)
    valid = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    odd = [one for one in valid if unicodedata.normalize("NFKC", one) != one or one.casefold() != one]
    for _ in range(2000):
        text = "".join(drawn.choices([*odd, *"abc 1"], k=12))
        found = hash_shingles(text, 2).tolist()
        forms = [unicodedata.normalize(form, text) for form in ("NFC", "NFD", "NFKC", "NFKD")]
        for same in (*forms, forms[2].casefold()):
            assert hash_shingles(same, 2).tolist() == found, ascii(text)
    for one, other in (("Nokia™ phones", "NOKIATM phones"), ("\U0001d407ello", "hello"), ("№ 5", "no 5")):
        assert hash_shingles(one, 2).tolist() == hash_shingles(other, 2).tolist()


def test_texts_without_letters_are_compared_by_their_characters() -> None:
    assert len(hash_shingles("!?! ...", 2)) == 5
    assert len(hash_shingles(" \n\t", 5)) == 0
    assert compute_signature("", 5).digest() == compute_signature(" \n", 5).digest()


@pytest.mark.parametrize("repeated", [61_681, 185_043])
def test_a_long_text_is_hashed_in_pieces_that_change_nothing(repeated: int) -> None:
    found = hash_shingles("word and another " * repeated, 3)
    assert set(found.tolist()) == set(hash_shingles("word and another " * 6, 3).tolist())
    assert len(found) == 3 * repeated - 2


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.7, 0.8, 0.9, 0.98])
def test_bands_find_nearly_all_pairs_of_the_similarity(similarity: float) -> None:
    bands = choose_bands(similarity)
    assert bands.count * bands.rows <= HASH_COUNT
    assert 1 - (1 - similarity**bands.rows) ** bands.count >= 0.99
    drawn = np.random.default_rng(0)
    equal = drawn.binomial(HASH_COUNT, (1 + similarity) / 2, 20_000)
    assert np.mean(equal >= bands.least_equal) > 0.985
