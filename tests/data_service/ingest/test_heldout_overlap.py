"""Held-out text of one corpus in the training text of another, held to a search of all places."""

import random
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from data_service.corpus.corpus import Corpus, open_corpus
from data_service.corpus.manifest import MIN_DOCUMENTS_TO_HASH_TOKENS, HeldoutRule
from data_service.corpus.merge import merge_corpora
from data_service.errors import CorpusError
from data_service.ingest.build import build_corpus
from data_service.ingest.heldout import hash_threshold, heldout_options_from_manifest
from data_service.ingest.heldout_overlap import (
    RUN_TOKENS,
    RUNS_PER_DOCUMENT,
    HeldoutIndex,
    find_overlap,
    rules_exclude_overlap,
)
from data_service.stream.statistics import corpus_stats
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.loss import TextLoss
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
from data_service.types import Block
from tests.support.data.raw_text import SMALL, build, ignore_progress, write_jsonl


def block_of(documents: list[list[int]], removed: set[int] = frozenset()) -> Block:  # type: ignore[assignment]
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    ends = np.cumsum([0, *map(len, documents)])
    gone = np.zeros(len(tokens), dtype=np.bool_)
    for number in removed:
        gone[ends[number] : ends[number + 1]] = True
    return Block(
        np.where(gone, 0, tokens).astype(np.uint16),
        ends.astype(np.int64),
        np.arange(len(documents) + 1),
        removed=gone if removed else None,
    )


def is_found(document: list[int], blocks: list[list[list[int | None]]]) -> bool:
    """Whether at least half of a held-out document's runs are in a block; a short one must be a whole document."""
    if len(document) < RUN_TOKENS:
        return any(document == other for block in blocks for other in block)
    last = len(document) - RUN_TOKENS
    places = sorted({int(place) for place in np.linspace(0, last, RUNS_PER_DOCUMENT if last else 1)})
    joined = [[token for other in block for token in other] for block in blocks]
    there = [
        any(
            block[at : at + RUN_TOKENS] == document[place : place + RUN_TOKENS]
            for block in joined
            for at in range(len(block) - RUN_TOKENS + 1)
        )
        for place in places
    ]
    return 2 * sum(there) >= len(there)


@pytest.mark.parametrize("seed", range(12))
def test_found_is_what_a_search_of_all_places_finds(seed: int) -> None:
    drawn = random.Random(seed)
    most = drawn.choice((0, 1, 500, 65_535))  # 0 is an id like others: it is the unknown word's in SentencePiece

    def text(least: int = 1) -> list[int]:
        return [
            drawn.randint(0, most) for _ in range(drawn.choice((least, RUN_TOKENS - 1, RUN_TOKENS, RUN_TOKENS + 1, 90)))
        ]

    held = [text() for _ in range(12)]
    trained = [text() for _ in range(12)]
    for document in drawn.sample(held, 8):
        kind = drawn.choice(("whole", "changed", "embedded", "half"))
        copy = list(document)
        if kind == "changed":
            copy[drawn.randrange(len(copy))] ^= 1
        if kind == "embedded":
            copy = [*text(), *copy, *text()]
        trained.append(copy[: len(copy) // 2 + 1] if kind == "half" else copy)
    drawn.shuffle(trained)
    blocks = [trained[:7], trained[7:]]
    left_out = [set(drawn.sample(range(len(block)), drawn.randint(0, len(block)))) for block in blocks]
    index = HeldoutIndex()
    gone = set(drawn.sample(range(6), drawn.randint(0, 2)))
    index.add_block(block_of(held[:6], gone))
    index.add_block(block_of(held[6:]))
    index.sort_hashes()
    read = list[list[list[int | None]]]()
    for block, removed in zip(blocks, left_out, strict=True):
        index.match_block(block_of(block, removed))
        read.append([[None] * len(each) if number in removed else [*each] for number, each in enumerate(block)])
    kept = [number for number in range(12) if number not in gone]
    expected = [number for number in kept if is_found(held[number], read)]
    found = index.compute_overlap()
    assert (found.documents, found.found) == (len(kept), len(expected))
    assert found.tokens == sum(len(held[number]) for number in kept)
    assert found.found_tokens == sum(len(held[number]) for number in expected)
    assert found.first == (expected[0] if expected else None)


def texts(count: int, seed: int) -> list[str]:
    drawn = random.Random(seed)
    words = ["".join(drawn.choices("abcdefghijkl", k=drawn.randint(2, 9))) for _ in range(800)]
    return [" ".join(drawn.choices(words, k=60)) for _ in range(count)]


@pytest.mark.long
def test_of_two_sizes_with_one_share_the_smaller_ones_text_is_found(tmp_path: Path) -> None:
    both = texts(300, 1)
    write_jsonl(tmp_path / "in-large/a.jsonl", [*both, *texts(900, 2)])
    write_jsonl(tmp_path / "in-small/a.jsonl", both)
    options = SMALL.model_copy(update={"heldout_fraction": 0.02})
    few = HeldoutRule("document", hash_threshold(0.01))  # what a much larger corpus would hold out
    build(tmp_path / "in-large", tmp_path / "large", options.model_copy(update={"heldout_rule": few}))
    build(tmp_path / "in-small", tmp_path / "small", options)
    large, small = (open_corpus(str(tmp_path / name)) for name in ("large", "small"))
    assert rules_exclude_overlap(large.manifest, small.manifest)
    assert not rules_exclude_overlap(small.manifest, large.manifest)
    found = find_overlap(small, large)
    assert found.documents == int(small.manifest.heldout.documents.sum())
    assert 0.3 * found.documents < found.found < found.documents
    assert find_overlap(large, small).found == 0
    build(tmp_path / "in-small", tmp_path / "like", options.model_copy(update={"heldout_rule": few}))
    like = open_corpus(str(tmp_path / "like"))
    assert rules_exclude_overlap(like.manifest, large.manifest)
    assert rules_exclude_overlap(large.manifest, like.manifest)
    assert find_overlap(like, large).found == find_overlap(large, like).found == 0


@pytest.mark.parametrize("unknown", [None, True, False])
def test_which_rules_keep_apart(tmp_path: Path, unknown: bool | None) -> None:
    """`unknown`: whether text was unknown to the tokenizer; None in a corpus that was built before it was measured."""
    write_jsonl(tmp_path / "in/a.jsonl", texts(100, 3))
    manifest = build(tmp_path / "in", tmp_path / "corpus")

    def by(rule: HeldoutRule | None) -> object:
        loss = None if unknown is None else TextLoss(characters=9, lost={"unknown": 1} if unknown else {})
        return replace(manifest, heldout_rule=rule, loss=loss)

    usual = HeldoutRule("document", hash_threshold(0.1))
    more, stretch = replace(usual, below=usual.below + 1), HeldoutRule("stretch", 9, 64)
    marked = replace(usual, clusters="a")
    tokens, more_tokens = replace(usual, by_tokens=True), replace(more, by_tokens=True)
    rules = [None, usual, tokens, more, more_tokens, stretch, replace(stretch, trained=(3,)), marked]
    apart = [[rules_exclude_overlap(by(one), by(other)) for other in rules] for one in rules]  # type: ignore[arg-type]
    text, by_the_tokens = [[flag, flag, not flag, flag, not flag] for flag in (True, False)]
    if unknown is not False:
        assert manifest.effective_heldout_rule == usual
        usually = [text, text, by_the_tokens]
        larger = [[False, False, False, flag, not flag] for flag in (True, False)]
    else:
        usually, larger = [[True] * 5] * 3, [[False, False, False, True, True]] * 2
    assert apart == [
        *([*row, False, False, False] for row in [*usually, *larger]),
        [False, False, False, False, False, True, False, False],
        [False, False, False, False, False, False, True, False],
        [False, False, False, False, False, False, False, True],
    ]


def with_unknown_words(tmp_path: Path, seed: int) -> tuple[str, list[str], list[str]]:
    """A tokenizer, few texts, and many that hold them: every other one has a character without a token."""
    drawn = random.Random(seed)
    tokenizer = train_tokenizer("wordpiece", iter(texts(30, seed)), 100, TokenizerOptions(), allow_fewer_ids=True)
    save_tokenizer(tokenizer, str(tmp_path / "tokenizer"))
    many = [f"{text} {drawn.choice('☃é漢')}" if drawn.random() < 0.5 else text for text in texts(1000, seed)]
    return str(tmp_path / "tokenizer"), many[:400], many


@pytest.mark.parametrize("seed", range(3))
def test_a_rule_that_is_given_divides_unknown_words_as_it_did_there(tmp_path: Path, seed: int) -> None:
    """Of few held-out documents the text decides, of many the tokens. One rule never trains on what it holds out."""
    tokenizer, few, many = with_unknown_words(tmp_path, seed)

    def built(name: str, chosen: list[str], like: Corpus | None = None) -> Corpus:
        options = SMALL.model_copy(update={} if like is None else heldout_options_from_manifest(like.manifest))
        path = write_jsonl(tmp_path / f"{name}.jsonl", chosen)
        build_corpus([str(path)], str(tmp_path / name), tokenizer, options, ignore_progress)
        return open_corpus(str(tmp_path / name))

    small, large = built("small", few), built("large", many)
    like_small, like_large = built("like-small", many, small), built("like-large", few, large)
    assert small.manifest.heldout_rule is large.manifest.heldout_rule is None
    made = (small, large, like_small, like_large)
    by_tokens = [corpus.manifest.effective_heldout_rule.by_tokens for corpus in made]
    assert by_tokens == [False, True, False, True]
    for one, other in permutations(made, 2):
        same = one.manifest.effective_heldout_rule == other.manifest.effective_heldout_rule
        assert rules_exclude_overlap(one.manifest, other.manifest) == same
        assert (find_overlap(one, other).found == 0) == same
    with pytest.raises(CorpusError, match="by_tokens"):
        merge_corpora([small.store.uri, large.store.uri], str(tmp_path / "both"), removed_by="me", removed_at=1)
    uris = [small.store.uri, like_small.store.uri]
    merge_corpora(uris, str(tmp_path / "grown"), removed_by="me", removed_at=1)
    grown = open_corpus(str(tmp_path / "grown")).manifest
    assert int(grown.heldout.documents.sum()) >= MIN_DOCUMENTS_TO_HASH_TOKENS
    assert grown.effective_heldout_rule == small.manifest.effective_heldout_rule
    assert corpus_stats(str(tmp_path / "grown")).heldout_rule is None


def test_corpora_without_unknown_words_go_together_however_they_divide_them(tmp_path: Path) -> None:
    options = SMALL.model_copy(update={"heldout_fraction": 0.1})
    for name, count in (("small", 300), ("large", 1000)):
        write_jsonl(tmp_path / f"in-{name}/a.jsonl", texts(count, 4))
        build(tmp_path / f"in-{name}", tmp_path / name, options)
    small, large = (open_corpus(str(tmp_path / name)) for name in ("small", "large"))
    assert small.manifest.effective_heldout_rule != large.manifest.effective_heldout_rule
    assert rules_exclude_overlap(small.manifest, large.manifest)
    assert find_overlap(small, large).found == 0
    report = merge_corpora([small.store.uri, large.store.uri], str(tmp_path / "both"), removed_by="me", removed_at=1)
    assert report.copies == 300
