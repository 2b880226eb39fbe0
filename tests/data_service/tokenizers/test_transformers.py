"""The same files give the same ids in transformers and in SentencePiece."""

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase

from data_service.tokenizers.load import from_files, save_tokenizer
from data_service.tokenizers.specials import Style
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer


def _theirs(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _ours(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encode_batch(texts)]


@pytest.mark.parametrize(
    ("kind", "style", "one", "two", "types"),
    [
        ("byte_bpe", "roberta", "<s>a</s>", "<s>a</s></s>a</s>", [0, 0, 0, 0, 0, 0]),
        ("wordpiece", "bert", "[CLS]a[SEP]", "[CLS]a[SEP]a[SEP]", [0, 0, 0, 1, 1]),
        ("unigram", "xlnet", "▁a<sep><cls>", "▁a<sep>▁a<sep><cls>", [0, 0, 1, 1, 2]),
    ],
)
def test_rows_are_laid_out_as_the_family_does(
    kind: Kind, style: Style, one: str, two: str, types: list[int], documents: list[str], tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(kind, documents, 1200, TokenizerOptions(specials=style))
    save_tokenizer(tokenizer, str(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert "".join(theirs.convert_ids_to_tokens(theirs("a")["input_ids"])) == one
    assert "".join(theirs.convert_ids_to_tokens(theirs("a", "a")["input_ids"])) == two
    assert theirs("a", "a", return_token_type_ids=True)["token_type_ids"] == types
    assert ("token_type_ids" in theirs("a", "a")) == (style != "roberta")


def test_the_mask_takes_the_space_before_it(trained: Callable[[Kind], Tokenizer], tmp_path: Path) -> None:
    tokenizer = trained("byte_bpe")
    save_tokenizer(tokenizer, str(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs("the <mask> is", add_special_tokens=False)["input_ids"]
    assert ids == [*tokenizer.encode("the"), tokenizer.special.mask, *tokenizer.encode(" is")]


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("strip_marks", [False, True])
def test_a_class_that_one_chooses_folds_what_the_vocabulary_was_learnt_with(
    tmp_path: Path, lowercase: bool, strip_marks: bool
) -> None:
    texts = ["The schön Boat má mạ Größe पढ़ाई came BACK"] * 20
    options = TokenizerOptions(lowercase=lowercase, strip_marks=strip_marks)
    tokenizer = train_tokenizer("wordpiece", texts, 200, options, allow_fewer_ids=True)
    _write(tokenizer.save_files(), tmp_path / "folder")
    lines = [texts[0], "ÄÖ schon", "THE BACK"]
    for theirs in (AutoTokenizer, BertTokenizer):
        assert _theirs(theirs.from_pretrained(tmp_path / "folder"), lines) == _ours(tokenizer, lines)


@pytest.mark.long
def test_sentencepiece_bpe_gives_the_same_ids(trained: Callable[[Kind], Tokenizer], lines: list[str]) -> None:
    tokenizer = trained("bpe")
    original = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.save_files()["spiece.model"])
    assert _ours(tokenizer, lines) == [original.encode(tokenizer.normalize(line)) for line in lines]
    alone = from_files({"spiece.model": tokenizer.save_files()["spiece.model"]})
    same = [line for line in lines if unicodedata.is_normalized("NFKC", line) and "\t" not in line]
    assert len(same) > 0.9 * len(lines)
    assert _ours(alone, same) == _ours(tokenizer, same)


def test_sentencepiece_unigram_gives_the_same_ids_up_to_ties(
    trained: Callable[[Kind], Tokenizer], lines: list[str]
) -> None:
    tokenizer = trained("unigram")
    original = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.save_files()["spiece.model"])
    theirs_of = [original.encode(tokenizer.normalize(line)) for line in lines]
    pairs = list(zip(_ours(tokenizer, lines), theirs_of, strict=True))
    different = [(ours, theirs) for ours, theirs in pairs if ours != theirs]
    assert len(different) < 0.02 * len(pairs)
    for ours, theirs in different:  # equal-scoring paths only
        assert sum(map(original.get_score, ours)) == pytest.approx(sum(map(original.get_score, theirs)), rel=1e-5)


def _write(files: dict[str, bytes], folder: Path) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
