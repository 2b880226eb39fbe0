# ruff: noqa: RUF001
"""Sentence boundaries, by the rules for all and by those of one language, and that no text is lost at them."""

import random
import re
import sys
from typing import get_args

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_service.ingest.sentences import (
    SENTENCE_TERMINAL,
    UNSPACED_LANGUAGES,
    Language,
    sentence_bounds,
    split_sentences,
    unspaced_boundaries,
)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", " Two!", " Three?", " Four"]),
        ("A line\nand another\n\n\nand a paragraph", ["A line", "\nand another", "\n\n\nand a paragraph"]),
        (
            "Dr. Smith met J. Doe, e.g. at 3.14 p.m. today.",
            ["Dr. Smith met J. Doe, e.g. at 3.14 p.m. today."],
        ),
        ('"Stop!" she said. "Go." He went.', ['"Stop!" she said.', ' "Go."', " He went."]),
        ("Wait... Now. (See below.) Then", ["Wait...", " Now.", " (See below.)", " Then"]),
        (
            "It ended etc. and so on. The U.S. Army came.",
            ["It ended etc. and so on.", " The U.S. Army came."],
        ),
        ("今日は。明日も！ そう", ["今日は。", "明日も！", " そう"]),
        ("  spaced \t out.   Next ", ["  spaced \t out.", "   Next "]),
        ("Windows\r\nlines\r\n", ["Windows", "\r\nlines\r\n"]),
        ("if x:\n    go. Now\n", ["if x:", "\n    go.", " Now\n"]),
        ("...", ["..."]),
        ("? What", ["?", " What"]),
        (" \n\t\n ", []),
        ("यह है। वह भी॥ और?", ["यह है।", " वह भी॥", " और?"]),
        ("كيف حالك؟ بخير۔ شكرا", ["كيف حالك؟", " بخير۔", " شكرا"]),
        ("Բարեւ։ Ինչպես ես։Լավ", ["Բարեւ։", " Ինչպես ես։", "Լավ"]),
        ("ሰላም። እንዴት፧ ደህና፡፡ ቻው", ["ሰላም።", " እንዴት፧", " ደህና፡፡", " ቻው"]),
        ("မင်္ဂလာပါ။ နေကောင်းလား။ကောင်း", ["မင်္ဂလာပါ။", " နေကောင်းလား။", "ကောင်း"]),
        ("សួស្តី។ សុខទេ៕ បាទ", ["សួស្តី។", " សុខទេ៕", " បាទ"]),
        ("བཀྲ་ཤིས། །ངའི་མིང་། །", ["བཀྲ་ཤིས། །", "ངའི་མིང་། །"]),
        ("สวัสดีครับ ผมชื่อ ต่าง ๆ ปี 2567 นะ", ["สวัสดีครับ", " ผมชื่อ", " ต่าง ๆ ปี 2567 นะ"]),
        ("円周率は３．１４である．次に", ["円周率は３．１４である．", "次に"]),
        ("Really‼ Yes⁈ no", ["Really‼", " Yes⁈ no"]),
        ("see a.b?c=1 at v1.2!x", ["see a.b?c=1 at v1.2!x"]),
    ],
)
def test_sentences_end_where_people_end_them(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@pytest.mark.long
def test_the_marks_are_those_that_unicode_calls_sentence_terminal() -> None:
    """Written out, so that a corpus has the same bytes with any library; newer versions may know more marks."""
    characters = [chr(code) for code in range(sys.maxunicode + 1)]
    unicode = {c for c in characters if regex.match(r"\p{Sentence_Terminal}", c)}
    assert {c for c in characters if SENTENCE_TERMINAL.match(c)} == unicode


@pytest.mark.parametrize("mark", ["।", "。", "؟", "\U00011141", "\U0001da88"])
def test_marks_of_other_scripts_need_no_space(mark: str) -> None:
    assert split_sentences(f"कक{mark}कक{mark} कक") == [f"कक{mark}", f"कक{mark}", " कक"]


@settings(deadline=None)
@given(
    st.text(st.sampled_from("ab.A!? \n\t…。\"')(é।؟ก ๆ፡།．1天，”’」）！？\u3000") | st.characters(codec="utf-8")),
    st.sampled_from(get_args(Language)),
)
@example("x " * 9000, "any")
@example(" a" + " " * 20_000 + "b", "any")
def test_sentences_are_the_text_and_none_is_blank(text: str, language: Language) -> None:
    sentences = split_sentences(text, language)
    assert "".join(sentences) == (text if text.strip() else "")
    assert all(sentence.strip() for sentence in sentences)
    for end, start in sentence_bounds(text, language):
        assert not text[end:start].strip()
        assert "\n" not in text[start : start + 1]


def test_dot_leaders_and_long_runs_take_linear_time() -> None:
    assert "".join(split_sentences("." * 200_000)) == "." * 200_000
    assert "".join(split_sentences("a. " * 200_000)).split() == ["a."] * 200_000


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


# The rule for Chinese and Japanese, sought from every mark: right, but slow for a run of marks that ends a line.
CLOSERS = "\"'”’»›)\\]}」』）】》〉〕"
NOT_BEFORE = "，、；：,;:。．！？!?…" + CLOSERS
FROM_EVERY_MARK = re.compile(
    r"(?:[。！？｡]|…{2}|\.{6}|(?<![A-Za-z0-9])[!?]|[!?](?![A-Za-z0-9])|(?<!\d)．|．(?!\d))"
    rf"[。！？｡!?…．]*+[{CLOSERS}]*+(?P<space>\s*+)(?=[^\s{NOT_BEFORE}])"
    rf"|(?<=[A-Za-z0-9])\.[{CLOSERS}]*+(?P<latin>\s++)(?=[^\sa-z{NOT_BEFORE}])"
)


def test_marks_behind_the_first_of_a_run_change_nothing() -> None:
    drawn, several = random.Random(29), 0
    characters = "。！？｡!?．…….. 你好aB3３、」)，"
    for _ in range(30_000):
        line = "".join(drawn.choices(characters, k=drawn.randint(1, 14))).replace("好", "......")
        expected = [(found.start(found.lastgroup or ""), found.end()) for found in FROM_EVERY_MARK.finditer(line)]
        assert list(unspaced_boundaries(line)) == expected
        several += len(expected) > 1
    assert several > 1_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("language", UNSPACED_LANGUAGES)
@pytest.mark.parametrize("marks", ["！", "!", "…", "。", "．", "！…", "…！", ".", "！）"])
def test_a_run_of_marks_at_the_end_of_a_line_takes_linear_time(language: Language, marks: str) -> None:
    text = f"你好{marks * (300_000 // len(marks))}"
    for line in (text, f"{text}{' ' * 300_000}，"):
        assert "".join(split_sentences(line, language)) == line


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *"aBé1.!?…\n \t\r\x0b\x85\u2028\u3000)\"'”»([«",
                "Mr.",
                "e.g.",
                "U.S.",
                "etc. ",
                "X.",
                "Prof.",
                ".\n",
            ]
        ),
        max_size=40,
    ).map("".join),
    st.sampled_from(["any", "any", "de", "fr", "ru"]),
)
@example("\n \u3000no. 12", "any")
@example("\t\tZ. x", "any")
def test_bounds_do_not_depend_on_the_other_scripts_of_a_text(text: str, language: Language) -> None:
    """With a Chinese sentence behind it, a text is read line by line, as other scripts need it."""
    with_chinese = sentence_bounds(text + "\n。", language).tolist()
    own = sentence_bounds(text, language).tolist()
    assert with_chinese[: len(own)] == own
    assert len(with_chinese) - len(own) == (1 if text.strip() else 0)


@pytest.mark.parametrize("text", ['" A.', ") B!", "”\u2003A. ", '" A etc.'])
def test_a_closing_mark_at_the_beginning_ends_nothing(text: str) -> None:
    assert len(sentence_bounds(text)) == 0
