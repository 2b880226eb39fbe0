"""What a tokenizer loses, in characters: beside counts that are made in another way, on random texts."""

import json
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from random import Random

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from data_service.errors import TokenizerError
from data_service.tokenizers.check import measure_loss
from data_service.tokenizers.loss import KINDS, TextLoss, check_text_loss
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer

ALPHABET = "aBcÄöéñ  \n\t.,1日かกЖжأ" + "e\u0301" + "\u200c\u200d\u00ad" + "ﬁ①２" + "य\u093cक\u094d"
texts_of = st.lists(st.text(st.sampled_from(ALPHABET), max_size=60), min_size=1, max_size=4)


def _with(tokenizer: Tokenizer, **changed: object) -> Tokenizer:
    definition = json.loads(tokenizer.save_files()["tokenizer.json"])
    return Tokenizer(json.dumps(definition | changed))


def _bert(*, lowercase: bool, marks: bool) -> dict[str, object]:
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": marks,
        "lowercase": lowercase,
    }


@given(texts_of)
def test_byte_level_loses_nothing_and_says_what_it_spells(
    trained: Callable[[Kind], Tokenizer], texts: list[str]
) -> None:
    tokenizer = trained("byte_bpe")
    loss = measure_loss(tokenizer, texts)
    assert loss.characters == sum(map(len, texts))
    assert set(loss.lost) <= {"bytes"}
    spelt = 0
    for text in texts:
        # A byte-level piece has one letter for each byte.
        ends = set(accumulate(len(tokenizer.piece(int(i))) for i in tokenizer.encode(text)))
        at = 0  # bytes; a character is spelt if a token ends inside it
        for character in text:
            size = len(character.encode())
            spelt += any(at < end < at + size for end in ends)
            at += size
    assert loss.lost.get("bytes", 0) == spelt


@given(texts_of, st.booleans(), st.booleans())
def test_wordpiece_counts_as_a_plain_statement_of_its_rules(
    trained: Callable[[Kind], Tokenizer], texts: list[str], lowercase: bool, marks: bool
) -> None:
    """Character by character: BERT's normalizer drops format characters, makes white space one space, folds case and
    strips marks as it is told."""
    tokenizer = _with(trained("wordpiece"), normalizer=_bert(lowercase=lowercase, marks=marks))
    expected = Counter[str]()
    for text in texts:
        for character in text:
            if unicodedata.category(character) == "Cf":
                expected["joiners"] += 1
            elif marks and any(unicodedata.category(c) == "Mn" for c in unicodedata.normalize("NFD", character)):
                expected["marks"] += 1
            elif lowercase and character.lower() != character:
                expected["case"] += 1
    loss = measure_loss(tokenizer, texts)
    found = {kind: count for kind, count in loss.lost.items() if kind not in ("unknown", "white_space")}
    assert found == expected


@given(texts_of)
def test_unknown_characters_are_those_of_unknown_words(trained: Callable[[Kind], Tokenizer], texts: list[str]) -> None:
    tokenizer = trained("wordpiece")
    codec = tokenizers.Tokenizer.from_str(tokenizer.save_files()["tokenizer.json"].decode())
    unknown = 0
    for text in texts:
        words = codec.pre_tokenizer.pre_tokenize_str(codec.normalizer.normalize_str(text))
        for word, _ in words:
            tokens = codec.model.tokenize(word)
            unknown += len(word) * (len(tokens) == 1 and tokens[0].value == "[UNK]" != word)
    loss = measure_loss(tokenizer, texts)
    dropped = sum(unicodedata.category(c) == "Cf" for text in texts for c in text)
    assert unknown <= loss.lost.get("unknown", 0) <= unknown + dropped, "a dropped character inside a word may count"


@given(texts_of)
def test_white_space_beyond_one_space_is_lost_where_it_makes_no_difference(
    trained: Callable[[Kind], Tokenizer], texts: list[str]
) -> None:
    plain = sum(
        character.isspace() and (character != " " or (place > 0 and text[place - 1].isspace()))
        for text in texts
        for place, character in enumerate(text)
    )
    assert measure_loss(trained("wordpiece"), texts).lost.get("white_space", 0) == plain
    assert measure_loss(trained("byte_bpe"), texts).lost.get("white_space", 0) == 0


@given(texts_of, st.integers(min_value=0))
def test_the_loss_of_parts_adds_up(trained: Callable[[Kind], Tokenizer], texts: list[str], seed: int) -> None:
    cut = seed % (len(texts) + 1)
    for kind in ("wordpiece", "unigram"):
        tokenizer = trained(kind)
        parts = [measure_loss(tokenizer, texts[:cut]), measure_loss(tokenizer, texts[cut:])]
        assert TextLoss.sum_of(parts) == measure_loss(tokenizer, texts)


def test_most_of_a_text_is_lost_only_by_consent(trained: Callable[[Kind], Tokenizer]) -> None:
    dna = "".join(Random(1).choices("ACGT", k=150))
    loss = measure_loss(trained("wordpiece"), ["the boat " * 3 + dna])
    assert loss.share("unknown") == pytest.approx(150 / 177)
    assert loss.top_examples("unknown") == (dna[:24],)
    with pytest.raises(TokenizerError) as raised:
        check_text_loss(loss, (), "a tokenizer", "give another")
    assert "--accept-loss unknown" in str(raised.value)
    check_text_loss(loss, ["unknown"], "a tokenizer", "give another")
    check_text_loss(measure_loss(trained("byte_bpe"), [dna]), (), "a tokenizer", "give another")


def test_case_and_bytes_are_said_and_never_refused() -> None:
    everything = TextLoss(characters=10, lost=dict.fromkeys(KINDS, 10))
    assert set(everything.kinds_above(0.2)) == set(KINDS) - {"case", "bytes"}


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
def test_a_vocabulary_that_has_no_latin_letter_loses_no_mark(kind: Kind) -> None:
    """Characters are looked at between letters that such a vocabulary does not know."""
    texts = ["पढ़ाई क्या मछुआरों ने जाल उतारे", "Ставка їжак ё", "แม่น้ำ ที่ ผู้", "می\u200cروم كَتَبَ"] * 20
    options = TokenizerOptions(byte_fallback=False, coverage=1.0)
    tokenizer = train_tokenizer(kind, texts, 300, options, allow_fewer_ids=True)
    loss = measure_loss(tokenizer, texts)
    # BERT's rules drop joiners; NFKC writes Thai's sara am as two characters.
    assert loss.lost == ({"joiners": 20} if kind == "wordpiece" else {"width": 20})
