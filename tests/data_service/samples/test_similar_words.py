"""MLM as correction: similar words of the same length, random ones where there is none, in the published shares."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from data_service.errors import CorpusError
from data_service.rng import stream_key
from data_service.samples.make import make_rows
from data_service.samples.masking import MaskingTables, MlmMasking
from data_service.samples.packing import pack_block
from data_service.samples.replacement import Replacement, Vocabulary
from data_service.samples.similar_words import (
    SimilarPair,
    SimilarSource,
    dump_similar_words,
    parse_similar_words,
    read_similar_words,
    replace_words,
    table_hash,
)
from data_service.samples.spec import SourceSpec
from data_service.stream.sources import Corpora
from data_service.types import Block
from tests.support.data.corpora import NEVER_MASKED, VOCABULARY, source_of, spec_of, write_corpus

MACBERT = Replacement(mask=0, similar=0.8, random=0.1, keep=0.1)
ORDINARY = np.setdiff1d(np.arange(VOCABULARY), NEVER_MASKED).astype(np.uint16)
IDS = st.integers(5, 14)
WORDS = st.lists(IDS, min_size=1, max_size=4).map(tuple)


def table_of(similar: dict[tuple[int, ...], tuple[int, ...]], tokenizer: str = "0" * 64) -> bytes:
    pairs = [SimilarPair(word, other) for word, other in similar.items()]
    return dump_similar_words(pairs, tokenizer=tokenizer, vocab_size=VOCABULARY, build_settings={})


def of_equal_sizes(similar: dict[tuple[int, ...], tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {word: other if len(other) == len(word) else () for word, other in similar.items()}


def plainly(
    words: list[list[int]],
    draws: list[list[int]],
    replace: Replacement,
    similar: dict[tuple[int, ...], tuple[int, ...]],
    known: dict[int, list[list[int]]],
) -> list[int]:
    """Said plainly, a word at a time."""
    found: list[int] = []
    for word, of_word in zip(words, draws, strict=True):
        action, low = of_word[0] >> 32, [draw & 0xFFFFFFFF for draw in of_word]
        mask, alike = replace.mask, replace.mask + replace.similar
        if action < round(mask * 2**32):
            found += [4] * len(word)
        elif action >= round((alike + replace.random) * 2**32):
            found += word
        elif action < round(alike * 2**32) and similar.get(tuple(word)):
            found += similar[tuple(word)]
        elif len(word) in known:
            found += known[len(word)][low[0] * len(known[len(word)]) >> 32]
        else:
            found += [int(ORDINARY[draw * len(ORDINARY) >> 32]) for draw in low]
    return found


@given(
    st.dictionaries(WORDS, WORDS, min_size=1, max_size=30).map(of_equal_sizes),
    st.lists(WORDS, min_size=1, max_size=40),
    st.sampled_from([MACBERT, Replacement(mask=0.3, similar=0.3, random=0.2, keep=0.2)]),
    st.integers(0, 99),
)
def test_words_are_replaced_as_said(
    similar: dict[tuple[int, ...], tuple[int, ...]],
    words: list[tuple[int, ...]],
    replace: Replacement,
    seed: int,
) -> None:
    table = parse_similar_words(table_of(similar), "table")
    target_ids = np.concatenate(words).astype(np.uint16)
    sizes = np.array([len(word) for word in words])
    draws = np.random.default_rng(seed).integers(0, 2**64, len(target_ids), dtype=np.uint64)
    replaced = replace_words(target_ids, sizes, draws, replace, Vocabulary(4, ORDINARY), table)
    known = {size: of_size.ids.tolist() for size, of_size in table.by_size.items()}
    assert sorted(tuple(word) for of_size in known.values() for word in of_size) == sorted(similar)
    each = [part.tolist() for part in np.split(draws, np.cumsum(sizes)[:-1])]
    assert replaced.tolist() == plainly([list(word) for word in words], each, replace, similar, known)
    assert replaced.dtype == np.uint16


def test_stored_words_of_a_row_are_replaced_by_their_similar_ones() -> None:
    """Every word that is hidden, where nothing else may happen to it."""
    rng = np.random.default_rng(3)
    vocabulary = [tuple(range(5 + 4 * n, 5 + 4 * n + n % 4 + 1)) for n in range(100)]
    similar = {word: vocabulary[(n + 4) % 100] for n, word in enumerate(vocabulary)}  # of the same length
    words = [vocabulary[i] for i in rng.integers(0, 100, 3000)]
    tokens = np.concatenate(words).astype(np.uint16)
    begins = np.zeros(len(tokens), dtype=bool)
    begins[np.cumsum([0, *map(len, words[:-1])])] = True
    sentences = np.append(np.flatnonzero(begins)[::50], len(tokens))
    block = Block(tokens, sentences, np.arange(len(sentences)), {"word": np.packbits(begins)})
    replace = Replacement(mask=0, similar=1.0, random=0, keep=0)
    masking = MlmMasking(unit="ngram", ngram_weights=(0.4, 0.3, 0.2, 0.1), replace=replace)
    spec = spec_of(SourceSpec(name="t", uri="", manifest_fingerprint=""), length=500, masking=masking)
    rows = pack_block(block, "full_sentences", 500)
    tables = MaskingTables(np.ones(VOCABULARY, bool), similar=parse_similar_words(table_of(similar), "table"))
    samples = make_rows(block, rows, 0, len(rows), spec, stream_key("x"), tables)
    replaced = samples.tokens[~np.isin(samples.tokens, NEVER_MASKED)]
    changed = at = 0
    for word in words:
        now = tuple(replaced[at : at + len(word)].tolist())
        assert now in (word, similar[word])
        changed, at = changed + len(word) * (now != word), at + len(word)
    assert changed == len(samples.target_ids) > 0.14 * len(tokens)


def test_a_table_comes_back_as_it_was_and_damage_is_named(tmp_path: Path) -> None:
    content = table_of({(5, 6): (7, 8), (9,): ()})
    (tmp_path / "table.txt").write_bytes(content)
    table = parse_similar_words(read_similar_words(str(tmp_path / "table.txt")), "table.txt")
    assert {size: (t.ids.tolist(), t.has_similar.tolist()) for size, t in table.by_size.items()} == {
        1: ([[9]], [False]),
        2: ([[5, 6]], [True]),
    }
    for damage in (
        b"",
        b"{}\n",
        content.replace(b"5 6", b"5 600"),
        content.replace(b"7 8", b"7"),
        content + b"x\n",
        b"\xff",
    ):
        with pytest.raises(CorpusError, match=r"^table\.txt .*: "):
            parse_similar_words(damage, "table.txt")
    with pytest.raises(CorpusError, match=r"absent\.txt"):
        read_similar_words(str(tmp_path / "absent.txt"))


def test_a_stream_reads_the_table_that_its_identity_names(tmp_path: Path) -> None:
    block = Block(np.arange(5, 105, dtype=np.uint16), np.array([0, 100]), np.array([0, 1]))
    source = source_of(write_corpus(tmp_path / "corpus", [block]))
    content, path = table_of({(5,): (6,)}), tmp_path / "table.txt"
    path.write_bytes(content)
    masking = MlmMasking(unit="whole_word", replace=MACBERT)
    named = SimilarSource(uri=str(path), hash=table_hash(content))
    spec = spec_of(source, masking=masking, similar=named)
    moved = spec.model_copy(update={"similar": named.model_copy(update={"uri": "elsewhere"})})
    assert moved.fingerprint == spec.fingerprint
    assert (
        spec_of(source, masking=masking, similar=SimilarSource(uri=str(path), hash="1")).fingerprint != spec.fingerprint
    )
    table = Corpora(spec).similar_words
    assert table is not None
    assert set(table.by_size) == {1}
    path.write_bytes(table_of({(5,): (7,)}))
    with pytest.raises(CorpusError, match=r"\bhash\b"):
        Corpora(spec).similar_words  # noqa: B018
    with pytest.raises(CorpusError, match=r"\btable\b"):
        Corpora(spec_of(source, masking=masking)).similar_words  # noqa: B018
    other = table_of({(5,): (6,)}, tokenizer="1" * 64)
    path.write_bytes(other)
    spec = spec_of(source, masking=masking, similar=SimilarSource(uri=str(path), hash=table_hash(other)))
    with pytest.raises(CorpusError, match=r"\btokenizer 111111111111"):
        Corpora(spec).similar_words  # noqa: B018


def test_what_goes_together() -> None:
    for settings in (
        {"unit": "token", "replace": MACBERT},
        {"unit": "whole_word", "ngram_weights": (1, 1)},
        {"unit": "ngram", "longest": 2, "ngram_weights": (1, 1)},
        {"unit": "ngram", "ngram_weights": (1, 0)},
    ):
        with pytest.raises(ValidationError):
            MlmMasking.model_validate(settings)
    with pytest.raises(ValidationError, match=r"mask.*random.*keep.*similar.*\b1\.8"):
        Replacement(similar=0.8)
    assert "similar" not in MlmMasking().model_dump_json()
    assert "ngram_weights" not in MlmMasking().model_dump_json()
