"""The report on real text says what is true of it."""

from collections.abc import Callable

import pytest

from data_service.errors import TokenizerError
from data_service.tokenizers.check import check_tokenizer
from data_service.tokenizers.tokenizer import Kind, Tokenizer


@pytest.mark.long
def test_byte_level_loses_nothing(trained: Callable[[Kind], Tokenizer], documents: list[str]) -> None:
    report = check_tokenizer(trained("byte_bpe"), documents)
    assert report.exact == report.stable == 1.0
    assert report.unknown == 0.0
    assert report.loss.kinds_above(0.0) == ()
    assert report.loss.characters == sum(map(len, documents))
    assert report.tokens == sum(len(trained("byte_bpe").encode(text)) for text in documents)
    assert 2 < report.bytes_per_token < 5
    assert 1 < report.tokens_per_word < 5
    assert 0.7 < report.coverage <= 1.0


@pytest.mark.long
def test_unknown_text_shows(trained: Callable[[Kind], Tokenizer]) -> None:
    report = check_tokenizer(trained("wordpiece"), ["日本語 the the the"])
    assert report.unknown == pytest.approx(0.5)
    assert report.loss.lost == {"unknown": 3}
    assert set(report.loss.examples["unknown"]) == set("日本語")
    assert report.exact == 0.0
    fallback = check_tokenizer(trained("unigram"), ["日本語 the the the"])
    assert fallback.unknown == 0.0
    assert fallback.loss.lost == {"bytes": 3}
    assert set(fallback.loss.examples["bytes"]) == set("日本語")
    assert fallback.exact == 1.0


def test_blank_text_is_an_error(trained: Callable[[Kind], Tokenizer]) -> None:
    with pytest.raises(TokenizerError, match=r"\btext\b"):
        check_tokenizer(trained("byte_bpe"), ["", " \n "])
