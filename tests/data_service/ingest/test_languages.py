# ruff: noqa: RUF001
"""Sentences by the rules of one language; without one, the rules stay as they were."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.ingest.languages import Language
from data_service.ingest.options import BuildOptions
from data_service.ingest.sentences import split_sentences


@pytest.mark.parametrize(
    ("language", "text", "sentences"),
    [
        ("zh", "今天很好。明天呢？好！", ["今天很好。", "明天呢？", "好！"]),
        ("zh", "“走吧！”，他说。“好。”她答。", ["“走吧！”，他说。", "“好。”", "她答。"]),
        ("zh", "他走了……没有人说话。", ["他走了……", "没有人说话。"]),
        ("zh", "他走了…没有人说话。", ["他走了…没有人说话。"]),
        ("zh", "等等......后来呢?!不知道!是的", ["等等......", "后来呢?!", "不知道!", "是的"]),
        ("zh", "价格是３．５元，Yahoo!Japan 和 3.5。第二", ["价格是３．５元，Yahoo!Japan 和 3.5。", "第二"]),
        ("zh", "（见下。）另外", ["（见下。）", "另外"]),
        ("zh", "He came. 他来了。 She left.", ["He came.", " 他来了。", " She left."]),
        ("ja", "「行こう！」と言った。はい。", ["「行こう！」", "と言った。", "はい。"]),
        (
            "de",
            "Am 3. Oktober kam Dr. Weber, vgl. Seite 4. Danach ging er.",
            ["Am 3. Oktober kam Dr. Weber, vgl. Seite 4. Danach ging er."],
        ),
        (
            "de",
            "Sie kam im Jahr 1990. Er ging bzw. Otto blieb. Ende.",
            ["Sie kam im Jahr 1990.", " Er ging bzw. Otto blieb.", " Ende."],
        ),
        ("fr", "M. Dupont et Mme. Curie sont là. Oui.", ["M. Dupont et Mme. Curie sont là.", " Oui."]),
        ("ru", "Он жил на ул. Ленина. Да.", ["Он жил на ул. Ленина.", " Да."]),
    ],
)
def test_sentences_of_a_language(language: Language, text: str, sentences: list[str]) -> None:
    assert split_sentences(text, language) == sentences


@given(
    st.text(st.sampled_from("天地a1 .!?。！？…．”’」）\n\u3000，") | st.characters(codec="utf-8")),
    st.sampled_from(get_args(Language)),
)
def test_nothing_but_white_space_is_lost(text: str, language: Language) -> None:
    sentences = split_sentences(text, language)
    assert all(sentence.strip() for sentence in sentences)
    assert "".join("".join(sentences).split()) == "".join(text.split())


def test_the_language_is_of_a_corpuss_identity_only_where_one_is_named() -> None:
    assert "sentences" not in BuildOptions().identity()
    assert BuildOptions(sentences="zh").identity()["sentences"] == "zh"
