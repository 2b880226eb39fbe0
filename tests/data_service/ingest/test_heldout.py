"""What is held out is never trained on, however the two texts were written down."""

import unicodedata
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.corpus.corpus import open_corpus
from data_service.corpus.manifest import BlockTable, CorpusManifest
from data_service.corpus.reader import read_block
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.ingest.scan import fold_text, hash_texts, hash_tokens
from data_service.store.base import Store
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.tokenizer import Kind
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
from tests.support.data.raw_text import DOCUMENTS, ignore_progress, small_tokenizer, write_jsonl

HALF = BuildOptions(
    accept_loss=frozenset({"unknown", "white_space"}),
    heldout_fraction=0.5,
    split_bytes=4096,
    block_tokens=500,
)
SPACES = ["", " ", "  ", "\t", "\n", "\r\n", "\u2028", "\u00a0", " \n\n"]
WORDS = ["One.", "Two!", "a", "é", "Café", "B", "漢", "字。", "e.g.", "\ufb01n", "x", "?", "7"]


def tokens_of(store: Store, table: BlockTable) -> list[bytes]:
    found = []
    for index in range(len(table)):
        block = read_block(store, table, index)
        found += [hash_tokens(block.tokens[a:b]) for a, b in pairwise(block.sentences[block.documents])]
    return found


def build_with(kind: Kind, folder: Path, inputs: Path) -> tuple[CorpusManifest, list[bytes], list[bytes]]:
    """A corpus, and the hashes of its training and of its held-out documents' tokens."""
    if kind == "byte_bpe":
        tokenizer = small_tokenizer()
    else:
        tokenizer = train_tokenizer(kind, iter(DOCUMENTS[:8]), 300, TokenizerOptions(lowercase=True))
    save_tokenizer(tokenizer, str(folder / "tokenizer"))
    build_corpus([str(inputs)], str(folder / "corpus"), str(folder / "tokenizer"), HALF, ignore_progress)
    corpus = open_corpus(str(folder / "corpus"))
    sides = [tokens_of(corpus.store, table) for table in (corpus.manifest.train, corpus.manifest.heldout)]
    return corpus.manifest, sides[0], sides[1]


def written_in_ways(random: Random) -> list[str]:
    """300 random short texts, each written in four ways that a tokenizer may or may not tell apart."""
    texts = []
    for _ in range(300):
        words = random.choices(WORDS, k=random.randint(1, 6))
        for _ in range(4):
            text = "".join(random.choice(SPACES) + word for word in words) + random.choice(SPACES)
            form: Literal["NFC", "NFD", "NFKC"] = random.choice(("NFC", "NFD", "NFKC"))
            texts.append(unicodedata.normalize(form, random.choice([text, text.upper()])))
    return texts


@pytest.mark.long
@pytest.mark.parametrize("kind", ["byte_bpe", "wordpiece"])
def test_equal_tokens_never_lie_on_both_sides(tmp_path: Path, kind: Kind) -> None:
    write_jsonl(tmp_path / "inputs/a.jsonl", written_in_ways(Random(kind)))
    manifest, train, heldout = build_with(kind, tmp_path, tmp_path / "inputs")
    assert not {*train} & {*heldout}
    assert manifest.counts["duplicates"] > 10
    assert min(len(train), len(heldout)) > 100


@settings(deadline=None)
@given(st.text(st.sampled_from("aB.!。 \t\n\r\u00a0\u2028\x1c”)é"), max_size=40))
def test_texts_that_differ_in_white_space_are_on_the_same_side(text: str) -> None:
    other = text.replace("\n", "\r\n") + "\n"
    assert hash_texts([text])[8:] == hash_texts([other])[8:]
    assert hash_texts([text])[:8] != hash_texts([other])[:8], "they have other tokens"


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=30), st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
def test_forms_case_and_spaces_do_not_change_sides(text: str, form: Literal["NFC", "NFD", "NFKC", "NFKD"]) -> None:
    mark = "x"  # a text without letters and digits is its own fold
    other = unicodedata.normalize(form, f" {mark}{text}\n".replace(" ", "  ").lower())
    assert fold_text(mark + text) == fold_text(other)
    padded = "a" * 9 * len(text)  # of which little is beyond ASCII
    assert fold_text(padded + text + mark) == padded + fold_text(text + mark)
