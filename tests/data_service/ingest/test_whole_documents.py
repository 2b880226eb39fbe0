# ruff: noqa: RUF001
"""A document's tokens are those of its whole text, and its sentences are places in them, in every script and with every
kind of tokenizer.
"""

import json
from collections.abc import Callable
from functools import cache
from random import Random
from typing import cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_service.ingest.blocks import encode_documents
from data_service.ingest.sentences import sentence_bounds
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.loss import LossMeter
from data_service.tokenizers.quick import TextEncoder
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
from data_service.tokenizers.whole_text import encode_in_windows
from tests.support.data.made_up import SCRIPTS, scripts_text
from tests.support.data.published_tokenizers import published_folder

TRAINED = ("byte_bpe", "wordpiece", "unigram", "bpe")
CHANGED = ("unprefixed", "spaced", "added")
KINDS = (*TRAINED, "albert", "xlnet", "deberta-v3", *CHANGED)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    texts = [scripts_text(seed, script) for script in SCRIPTS for seed in range(60)]

    @cache
    def of(kind: str) -> Tokenizer:
        if kind in ("albert", "xlnet", "deberta-v3"):
            return load_tokenizer(str(published_folder(kind, texts, tmp_path_factory.mktemp("run") / kind, 900)))
        if kind in CHANGED:
            return {"unprefixed": _unprefixed, "spaced": _spaced, "added": _added}[kind](of)
        options = TokenizerOptions(coverage=0.99, min_frequency=1, alphabet=500)
        return train_tokenizer(cast(Kind, kind), texts, 1100, options)

    return of


def _unprefixed(of: Callable[[str], Tokenizer]) -> Tokenizer:
    """As a model with add_dummy_prefix: false, whose words after a space need that space in the same text."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    from data_service.tokenizers.load import from_files

    proto = ModelProto()
    proto.ParseFromString(of("unigram").save_files()["spiece.model"])
    proto.normalizer_spec.add_dummy_prefix = False
    return from_files({"spiece.model": proto.SerializeToString()})


def _spaced(of: Callable[[str], Tokenizer]) -> Tokenizer:
    """As RoBERTa's with add_prefix_space: true, which puts a space before every text."""
    definition = json.loads(of("byte_bpe").save_files()["tokenizer.json"])
    definition["pre_tokenizer"]["add_prefix_space"] = True
    return Tokenizer(json.dumps(definition))


def _added(of: Callable[[str], Tokenizer]) -> Tokenizer:
    """With an added token that lies across the bounds of sentences."""
    tokenizer = of("byte_bpe")
    definition = json.loads(tokenizer.save_files()["tokenizer.json"])
    new = {"id": tokenizer.vocab_size, "content": "。あ", "special": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition["added_tokens"].append(new | flags)
    return Tokenizer(json.dumps(definition))


def _check(tokenizer: Tokenizer, text: str) -> None:
    """Said plainly, token by token: where sentences begin, and how many begin inside a token."""
    (document,) = encode_documents(tokenizer, [text])
    np.testing.assert_array_equal(document.tokens, tokenizer.encode(text))
    assert document.lengths.sum() == len(document.tokens)
    assert (document.lengths > 0).all()
    (placed,) = tokenizer.encode_placed([text])
    tokens = list(zip(placed.starts.tolist(), placed.ends.tolist(), strict=True))
    firsts, across = {0}, 0
    for end, start in sentence_bounds(text):
        assert not text[end:start].strip()
        first = next((i for i, token in enumerate(tokens) if token[0] >= end), len(tokens))
        if first and tokens[first - 1][1] > start:
            first, across = first - 1, across + 1
        firsts.add(first)
    expected = sorted(first for first in firsts if first < len(tokens))
    assert np.append(0, np.cumsum(document.lengths)[:-1]).tolist() == (expected or [0])
    assert document.moved == across
    encoder, meters = _encoder(tokenizer), (LossMeter(tokenizer), LossMeter(tokenizer))
    (quick,) = encode_documents(encoder, [text], meter=meters[0])
    encode_documents(tokenizer, [text], meter=meters[1])
    assert not any("differs" in library for library in encoder.counts)
    assert (quick.moved, quick.lengths.tolist()) == (document.moved, document.lengths.tolist())
    np.testing.assert_array_equal(quick.tokens, document.tokens)
    assert meters[0].total() == meters[1].total()


@cache
def _encoder(tokenizer: Tokenizer) -> TextEncoder:
    return TextEncoder(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_document_is_encoded_whole(trained: Callable[[str], Tokenizer], kind: str, script: str) -> None:
    for seed in range(2):
        text = "\n".join(scripts_text(1000 * seed + line, script) for line in range(3))
        _check(trained(kind), text)


@settings(deadline=None, max_examples=25)
@given(
    st.text(
        st.sampled_from("日本語。！？「」』あいกขค ๆ។؟։།aB.!?\"') \n\r\t\u3000\u0301\ufe0f")
        | st.characters(codec="utf-8"),
        max_size=60,
    )
)
@example("今日は。「明日も！」 そう。'sあ。")
@example("a。\u0301b。\u3099 c")
@example("def f(x):\r\n\tif x:\n        return x\n\n\n# End.\n")
def test_random_text_of_many_scripts(trained: Callable[[str], Tokenizer], text: str) -> None:
    for kind in KINDS:
        _check(trained(kind), text)


@pytest.mark.parametrize("kind", KINDS)
def test_text_encoded_in_windows_has_the_tokens_of_the_whole(trained: Callable[[str], Tokenizer], kind: str) -> None:
    tokenizer = trained(kind)
    for seed in range(12):
        random = Random(f"{kind} {seed}")
        text = "\n".join(scripts_text(seed * 100 + n, random.choice(list(SCRIPTS))) for n in range(40))
        (found,), cuts = encode_in_windows(tokenizer, [text], window=random.randrange(300, 900))
        (whole,) = tokenizer.encode_placed([text])
        assert cuts == 0
        assert found.equals(whole)


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "bpe", "wordpiece"])
def test_text_that_is_one_word_is_cut_and_counted_and_none_of_it_lost(
    trained: Callable[[str], Tokenizer], kind: str
) -> None:
    tokenizer = trained(kind)
    text = "before " + "".join(Random(kind).choices("acgt", k=5000)) + " behind, and more of it"
    (found,), cuts = encode_in_windows(tokenizer, [text], window=600)
    covered = np.zeros(len(text), dtype=bool)
    for start, end in zip(found.starts.tolist(), found.ends.tolist(), strict=True):
        covered[start:end] = True
    assert all(covered[i] for i, character in enumerate(text) if not character.isspace())
    assert (np.diff(found.starts) >= 0).all()
    if kind == "wordpiece":
        assert cuts > 0, "one unknown word became several"
    else:
        assert tokenizer.decode(found.ids).split() == text.split()


def test_documents_do_not_run_into_each_other(trained: Callable[[str], Tokenizer]) -> None:
    tokenizer = trained("unigram")
    texts = [scripts_text(1), "", scripts_text(2)]
    documents = encode_documents(tokenizer, texts)
    assert [len(document.tokens) == 0 for document in documents] == [False, True, False]
    for document, text in zip(documents, texts, strict=True):
        np.testing.assert_array_equal(document.tokens, tokenizer.encode(text))
