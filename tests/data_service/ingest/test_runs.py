# ruff: noqa: RUF001
"""Sentences laid end to end are the tokens of the whole document, in every script and with every kind of tokenizer."""

import json
from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_service.ingest.blocks import encode_sentences
from data_service.ingest.sentences import LONGEST, split_sentences
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
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
            return load_tokenizer(
                str(published_folder(kind, texts, tmp_path_factory.mktemp("run") / kind, 900))
            )
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


def _same(tokenizer: Tokenizer, text: str) -> None:
    sentences = split_sentences(text)
    parts = [one.ids for one in encode_sentences(tokenizer, [sentences])]
    assert len(parts) == len(sentences)
    whole = tokenizer.encode("".join(sentences))
    np.testing.assert_array_equal(np.concatenate([*parts, whole[:0]]), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_tokens_of_a_document_are_those_of_its_sentences(
    trained: Callable[[str], Tokenizer], kind: str, script: str
) -> None:
    for seed in range(4):
        text = "\n".join(scripts_text(1000 * seed + line, script) for line in range(3))
        _same(trained(kind), text)


@settings(deadline=None, max_examples=25)
@given(
    st.text(
        st.sampled_from("日本語。！？「」』あいกขค ๆ।؟։།aB.!?\"') \n\t\u3000\u0301\ufe0f")
        | st.characters(codec="utf-8"),
        max_size=60,
    )
)
@example("今日は。「明日も！」 そう。'sあ。")
@example("a。\u0301b。\u3099 c")
def test_random_text_of_many_scripts(trained: Callable[[str], Tokenizer], text: str) -> None:
    for kind in KINDS:
        _same(trained(kind), text)


def test_the_issues_example_has_no_space_mark_inside(trained: Callable[[str], Tokenizer]) -> None:
    tokenizer = trained("unigram")
    text = "今日は良い天気です。明日も晴れるでしょう。散歩に行きましょう。"
    parts = [one.ids for one in encode_sentences(tokenizer, [split_sentences(text)])]
    assert [tokenizer.decode(part) for part in parts] == split_sentences(text)
    pieces = [tokenizer.piece(int(i)) for part in parts for i in part]
    assert not any("▁" in piece for piece in pieces[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_longer_than_a_run_loses_nothing_and_gains_no_space(
    trained: Callable[[str], Tokenizer], kind: str
) -> None:
    tokenizer = trained(kind)
    text = "".join(scripts_text(seed, "kana", 40).replace(" ", "") for seed in range(60)) + "x" * (
        2 * LONGEST
    )
    assert len(text) > 3 * LONGEST
    parts = [one.ids for one in encode_sentences(tokenizer, [split_sentences(text)])]
    whole = tokenizer.encode(text)
    laid = np.concatenate(parts).tolist()
    if kind != "wordpiece":  # for which a word of so many letters is unknown, and its parts are, too
        assert tokenizer.decode(laid) == tokenizer.decode(whole)
        assert abs(len(laid) - len(whole)) <= 8


def test_documents_do_not_run_into_each_other(trained: Callable[[str], Tokenizer]) -> None:
    tokenizer = trained("unigram")
    first, second = (split_sentences(scripts_text(seed)) for seed in (1, 2))
    both = [one.ids for one in encode_sentences(tokenizer, [first, [], second])]
    assert len(both) == len(first) + len(second)
    np.testing.assert_array_equal(np.concatenate(both[len(first) :]), tokenizer.encode("".join(second)))
