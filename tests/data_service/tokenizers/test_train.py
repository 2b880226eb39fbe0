# ruff: noqa: RUF001
"""Training: deterministic, of the size asked for, with errors that say what to do."""

import io
import json
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from data_service.errors import InputError, TokenizerError
from data_service.tokenizers.check import measure_loss
from data_service.tokenizers.files import TRAINING_REPORT
from data_service.tokenizers.specials import Style
from data_service.tokenizers.tokenizer import Kind
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
from tests.support.data.all_sorts import SORTS, documents_of_all_sorts

_TRAIN = """
import sys, pydoc_data.topics
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
texts = [topic for _, topic in sorted(pydoc_data.topics.topics.items())][:20]
print(train_tokenizer(sys.argv[1], texts, 700, TokenizerOptions(alphabet=60)).hash)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["byte_bpe", "wordpiece", "unigram", "bpe"])
def test_the_same_text_gives_the_same_tokenizer_in_any_process(kind: Kind) -> None:
    hashes = {
        subprocess.run([sys.executable, "-c", _TRAIN, kind], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("kind", ["byte_bpe", "wordpiece", "unigram", "bpe"])
def test_neither_the_order_of_texts_nor_the_number_of_processes_matters(
    kind: Kind, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tables so small that each is spilled many times; the rarest words are left out."""
    monkeypatch.setattr("data_service.tokenizers.word_counts._MAX_TABLE_PIECES", 700)
    monkeypatch.setattr("data_service.tokenizers.train.MAX_TRAINING_WORD_BYTES", 15_000)
    texts = [*documents[:20], *(SORTS["language"](Random(seed)) for seed in range(40))]
    made = []
    for workers in (1, 2):
        Random(f"{kind} {workers}").shuffle(texts)
        made.append(train_tokenizer(kind, texts, 2500, allow_fewer_ids=True, workers=workers).save_files())
    assert made[0] == made[1]
    report = json.loads(made[0][TRAINING_REPORT])
    assert 0 < report["left_out"] < report["words"] / 2


@pytest.mark.parametrize("lowercase", [False, True])
def test_wordpieces_are_those_that_the_library_learns_from_the_text(lowercase: bool, documents: list[str]) -> None:
    texts = [*documents, *(SORTS["language"](Random(seed)) for seed in range(100))]
    ours = train_tokenizer("wordpiece", texts, 4000, TokenizerOptions(lowercase=lowercase))
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=False)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    letters = [piece for piece in ours.pieces if len(piece.removeprefix("##")) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=4000,
        min_frequency=2,
        limit_alphabet=0,
        special_tokens=[*ours.pieces[:5], *letters],
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    vocabulary = library.get_vocab()
    assert list(ours.pieces) == sorted(vocabulary, key=vocabulary.__getitem__)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepieces_are_those_of_the_text_itself(kind: Kind, documents: list[str]) -> None:
    """BPE's all are. Unigram training finds its first strings in all of the text where it learns from sentences, so
    that some of its pieces differ."""
    ours = train_tokenizer(kind, documents, 1500)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in documents for line in unicodedata.normalize("NFKC", text).splitlines()),
        model_writer=model,
        model_type=kind,
        vocab_size=1500,
        byte_fallback=True,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        control_symbols=["<pad>", "[CLS]", "[SEP]", "[MASK]"],
        normalization_rule_name="nfkc",
        max_sentence_length=1 << 16,
        num_threads=4,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = {theirs.id_to_piece(index) for index in range(theirs.get_piece_size())}
    shared = len(pieces.intersection(ours.pieces))
    assert shared >= (1480 if kind == "bpe" else 1200)


@pytest.mark.parametrize("kind", ["byte_bpe", "wordpiece", "unigram", "bpe"])
@pytest.mark.parametrize("texts", [[], ["", " \n\t"]])
def test_no_text_is_an_error(kind: Kind, texts: list[str]) -> None:
    with pytest.raises(TokenizerError, match=r"\btext\b"):
        train_tokenizer(kind, texts, 1000)


@pytest.mark.parametrize("kind", ["byte_bpe", "wordpiece", "unigram", "bpe"])
def test_a_vocabulary_too_small_names_the_least(kind: Kind, documents: list[str]) -> None:
    with pytest.raises(TokenizerError, match=r"\b20\b.*small") as raised:
        train_tokenizer(kind, documents, 20)
    least = int("".join(c for c in raised.value.remedy.split(",")[0] if c.isdigit()))
    assert train_tokenizer(kind, documents, least + 1).vocab_size == least + 1


@pytest.mark.parametrize("kind", ["byte_bpe", "wordpiece", "unigram", "bpe"])
def test_a_vocabulary_too_large_names_the_most(kind: Kind, documents: list[str]) -> None:
    with pytest.raises(TokenizerError, match=r"\b50000\b.*large") as raised:
        train_tokenizer(kind, documents[:3], 50_000)
    most = int(raised.value.remedy.split()[2])
    assert train_tokenizer(kind, documents[:3], most).vocab_size == most


CASES = [("The", "the"), ("ÉTÉ", "été"), ("Жук", "жук"), ("Ώρα", "ώρα"), ("Բառ", "բառ")]
MARKS = [
    *(("schön", "schon"), ("má", "ma"), ("mạ", "ma"), ("पढ़ाई", "पढाई"), ("עִבְרִית", "עברית"), ("كَتَبَ", "كتب")),
    *(("ё", "е"), ("ñ", "n"), ("가\u0301", "가"), ("क्या", "कया"), ("แม่", "แม")),
]
JOINED = ("می\u200cروم کتاب\u200cها خانه\u200cای", "ක්\u200dෂ ශ්\u200dරී", "క్\u200cష రాజ్\u200cకుమార్")


@pytest.mark.parametrize("kind", ["byte_bpe", "wordpiece", "unigram", "bpe"])
def test_an_error_while_reading_comes_through_as_it_is(kind: Kind) -> None:
    def texts() -> Iterator[str]:
        yield "some text"
        raise InputError("book.txt: byte 17 is not UTF-8", remedy="replace it")

    with pytest.raises(InputError, match="byte 17"):
        train_tokenizer(kind, texts(), 400)


def test_bytes_are_not_folded(documents: list[str]) -> None:
    for folded in (TokenizerOptions(lowercase=True), TokenizerOptions(strip_marks=True)):
        with pytest.raises(TokenizerError, match="byte_bpe"):
            train_tokenizer("byte_bpe", documents, 1500, folded)


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("strip_marks", [False, True])
def test_case_and_marks_are_folded_only_as_asked(kind: Kind, lowercase: bool, strip_marks: bool) -> None:
    """Two words of every script, which differ in case or in a mark, have different tokens unless that is folded."""
    texts = [" ".join(pair) for pair in CASES + MARKS] * 6
    options = TokenizerOptions(lowercase=lowercase, strip_marks=strip_marks, coverage=1.0)
    tokenizer = train_tokenizer(kind, texts, 900, options, allow_fewer_ids=True)
    for pairs, folded in ((CASES, lowercase), (MARKS, strip_marks)):
        for first, second in pairs:
            assert np.array_equal(tokenizer.encode(first), tokenizer.encode(second)) == folded, (
                first,
                second,
            )
    loss = measure_loss(tokenizer, texts)
    assert ("case" in loss.lost, "marks" in loss.lost) == (lowercase, strip_marks)
    assert set(loss.lost) <= {"case", "marks", "bytes"}


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "bpe"])
def test_nothing_of_text_of_all_sorts_is_lost_but_white_space(kind: Kind) -> None:
    """Joiners and marks stay, of forty languages; SentencePiece's kinds fold compatibility forms, and say so."""
    texts = [SORTS["language"](Random(seed)) for seed in range(150)] + [*JOINED] * 4
    tokenizer = train_tokenizer(kind, texts, 4000, allow_fewer_ids=True)
    loss = measure_loss(tokenizer, [*texts, *documents_of_all_sorts(50, seed=3)])
    assert set(loss.lost) <= ({"bytes"} if kind == "byte_bpe" else {"bytes", "white_space", "width"})
    for text in JOINED:
        spaced = text.replace("\u200c", " ").replace("\u200d", " ")
        assert not np.array_equal(tokenizer.encode(text), tokenizer.encode(spaced))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["byte_bpe", "wordpiece", "bpe"])
def test_a_line_without_spaces_is_learnt_from_in_time(kind: Kind) -> None:
    """A million letters in one run took minutes, since trainers look at whole words again and again."""
    letters = "".join(Random(kind).choices("ACGT", k=1_000_000))
    tokenizer = train_tokenizer(kind, [letters], 600, allow_fewer_ids=True)
    assert tokenizer.vocab_size > 500


def test_wordpiece_splits_cjk_characters() -> None:
    tokenizer = train_tokenizer("wordpiece", ["深度学习 的 深度 模型 and latin words latin words " * 5], 40)
    assert [tokenizer.piece(i) for i in tokenizer.encode("深度的")] == ["深", "度", "的"]
    assert not any(piece.startswith("##深") for piece in tokenizer.pieces)


@pytest.mark.long
def test_without_byte_fallback_rare_characters_are_unknown(documents: list[str]) -> None:
    tokenizer = train_tokenizer("unigram", documents, 1500, TokenizerOptions(byte_fallback=False))
    assert tokenizer.special.unk in tokenizer.encode("日本")
    assert not any(piece.startswith("<0x") for piece in tokenizer.pieces)


def test_a_line_longer_than_sentencepiece_takes_is_not_lost() -> None:
    words = " ".join(f"word{i % 97}" for i in range(40_000))
    tokenizer = train_tokenizer("bpe", [words], 320, TokenizerOptions(coverage=1.0))
    assert "▁word" in tokenizer.pieces


@pytest.mark.parametrize(
    ("style", "kind", "first"),
    [
        ("roberta", "byte_bpe", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]),
        ("bert", "wordpiece", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
        ("albert", "unigram", ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]),
        ("deberta", "unigram", ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]),
        ("bert", "byte_bpe", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
        ("xlnet", "unigram", ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]),
        ("xlnet", "bpe", ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]),
    ],
)
def test_special_tokens_stand_first_in_the_family_order(
    style: Style, kind: Kind, first: list[str], documents: list[str]
) -> None:
    tokenizer = train_tokenizer(kind, documents, 1200, TokenizerOptions(specials=style))
    assert list(tokenizer.pieces[: len(first)]) == first
    assert tokenizer.piece(tokenizer.special.mask) == next(piece for piece in first if "mask" in piece.lower())
    assert tokenizer.special_mask.sum() == len(first)
    assert len(set(tokenizer.pieces)) == 1200


def test_ordinary_words_beside_a_long_run_keep_the_space_before_them() -> None:
    words = ["hello world people river"] * 50
    runs = ["0123456789abcdef" * 80, *words]
    for texts in (words, [" ".join(runs)]):
        tokenizer = train_tokenizer("byte_bpe", texts, 400, allow_fewer_ids=True)
        pieces = [tokenizer.piece(i) for i in tokenizer.encode("a people river people")]
        assert pieces == ["a", "Ġpeople", "Ġriver", "Ġpeople"]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_lines_with_a_character_that_sentencepiece_skips_are_learnt_from(kind: Kind) -> None:
    texts = ["progress ▅▅ window"] * 50 + ["other text"] * 50
    tokenizer = train_tokenizer(kind, texts, 330, allow_fewer_ids=True)
    assert "w" in "".join(piece for piece in tokenizer.pieces if not piece.startswith("<"))
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]
