"""Tokenizers as people have them: the ids of `transformers.AutoTokenizer`, or a refusal that names the class; and what
decides where a folder's `tokenizer.json` and its class do not agree.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from data_service.errors import TokenizerError
from data_service.tokenizers.load import load_tokenizer, load_with_all_special_tokens, save_tokenizer
from data_service.tokenizers.specials import END_OF_DOCUMENT_TOKEN
from data_service.tokenizers.train import train_tokenizer
from tests.support.data.all_sorts import documents_of_all_sorts
from tests.support.data.random_text import random_text
from tests.support.data.tokenizer_folders import FOLDERS

UNKNOWN = (
    "BertJapaneseTokenizer",
    "PegasusTokenizer",
    "RoFormerTokenizer",
    "CanineTokenizer",
    "MyOwnTokenizerFast",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: FOLDERS[name](tmp_path_factory.mktemp("made")))


@pytest.fixture
def copied(made: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A folder of its own, with these settings of the tokenizer changed."""

    def copy(name: str, **settings: object) -> Path:
        folder = tmp_path / "folder"
        shutil.copytree(made(name), folder)
        if settings:
            edit(folder / "tokenizer_config.json", lambda config: config.update(settings))
        return folder

    return copy


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.default_cases(10)
@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_the_class(made: Callable[[str], Path], name: str) -> None:
    """Of documents with other special tokens in any place, and of random text."""
    folder = made(name)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder), "agreeing")
    assert ours.vocab_size == len(theirs)
    names = [piece for role, piece in ours.names.by_role().items() if role != "unk"] + [END_OF_DOCUMENT_TOKEN]
    further = [piece for i in np.flatnonzero(ours.special_mask) if (piece := ours.piece(int(i))) not in names]
    random, texts = Random(name), list[str]()
    for text in documents_of_all_sorts(40, seed=5):
        if further:
            at = random.randrange(len(text))
            text = text[:at] + random.choice(["", " "]) + random.choice(further) + text[at:]
        texts += [] if any(piece in text for piece in names) else [text]
    texts += [random_text(random) for _ in range(200)]
    expected = theirs(texts, add_special_tokens=False).input_ids
    for text, ids, wanted in zip(texts, ours.encode_batch(texts), expected, strict=True):
        assert ids.tolist() == wanted, repr(text)


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_saved_is_no_question_any_more(made: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(str(made(name)))
    save_tokenizer(tokenizer, str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    again = load_tokenizer(str(tmp_path), "agreeing")
    assert again.hash == tokenizer.hash
    text = " ".join([*tokenizer.names.by_role().values(), "a"])
    roles = set(vars(tokenizer.special).values()) - {tokenizer.special.unk}
    assert not roles & set(again.encode(text).tolist()), "names of roles in text are text"


@pytest.mark.parametrize("named", UNKNOWN)
@pytest.mark.parametrize("name", ["distilbert", "roberta", "albert"])
def test_a_class_that_we_do_not_know_is_refused_by_name(copied: Callable[..., Path], name: str, named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        load_tokenizer(str(copied(name, tokenizer_class=named)))


def test_a_type_of_model_that_we_do_not_know_is_refused_by_name(copied: Callable[..., Path]) -> None:
    folder = copied("spanbert")
    (folder / "config.json").write_text(json.dumps({"model_type": "roc_bert"}))
    with pytest.raises(TokenizerError, match="roc_bert"):
        load_tokenizer(str(folder))


def _no_lowercase(definition: dict[str, Any]) -> None:
    definition["normalizer"] = definition["normalizer"] | {"lowercase": False}


def _no_lowercase_at_all(definition: dict[str, Any]) -> None:
    definition["normalizer"] = {"type": "NFC"}


def _other_words(definition: dict[str, Any]) -> None:
    definition["pre_tokenizer"] = {"type": "WhitespaceSplit"}


def _another_unknown(definition: dict[str, Any]) -> None:
    definition["model"]["unk_id"] = 0


def _one_piece_changed(definition: dict[str, Any]) -> None:
    """No text differs but one with the rarest piece: found since pieces of the vocabulary are compared, too."""
    vocabulary = definition["model"]["vocab"]
    assert isinstance(vocabulary, dict)
    last = sorted(vocabulary)[0]
    definition["normalizer"] = {"type": "Replace", "pattern": {"String": last}, "content": "the"}


def _no_prefix(definition: dict[str, Any]) -> None:
    definition["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}


@pytest.mark.default_cases(6)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("saved-bert-uncased", _no_lowercase),
        ("saved-bert-uncased", _other_words),
        ("saved-roberta", _no_prefix),
        ("saved-xlm-roberta", _other_words),
        ("saved-deberta-v3", _other_words),
        ("saved-t5", _other_words),
        ("saved-barthez", _other_words),
        ("saved-rembert", _other_words),
        ("saved-big-bird", _other_words),
        ("saved-mbart", _another_unknown),
        ("saved-llama-2", _other_words),
        ("saved-splinter", _no_lowercase_at_all),
    ],
)
def test_a_file_and_a_class_that_disagree_are_a_question(
    copied: Callable[..., Path], name: str, change: Callable[[dict[str, Any]], None]
) -> None:
    """The class's answer is that of `transformers` 5, the file's that of version 4 and of the plain class."""
    folder = copied(name)
    edit(folder / "tokenizer.json", change)
    by_class, by_file = (load_tokenizer(str(folder), rules) for rules in ("class", "file"))
    with pytest.raises(TokenizerError) as raised:
        load_tokenizer(str(folder), "agreeing")
    assert all(f"--tokenizer-rules {rules}" in str(raised.value) for rules in ("class", "file"))
    assert by_class.hash != by_file.hash
    theirs = AutoTokenizer.from_pretrained(folder)
    edit(folder / "tokenizer_config.json", lambda its: its.update(tokenizer_class="PreTrainedTokenizerFast"))
    plain = AutoTokenizer.from_pretrained(folder)
    differing = 0
    for text in documents_of_all_sorts(60, seed=8):
        assert by_class.encode(text).tolist() == theirs(text, add_special_tokens=False).input_ids
        assert by_file.encode(text).tolist() == plain(text, add_special_tokens=False).input_ids
        differing += not np.array_equal(by_class.encode(text), by_file.encode(text))
    assert differing > 0


@pytest.mark.parametrize(
    ("name", "settings", "model_type"),
    [
        ("saved-fnet", {}, "fnet"),
        ("saved-convbert", {}, "convbert"),
        ("modernbert", {"tokenizer_class": "BertTokenizer"}, "modernbert"),
        ("llama-3", {"tokenizer_class": "LlamaTokenizer"}, "llama"),
    ],
)
def test_classes_that_follow_the_file_raise_no_question(
    copied: Callable[..., Path], name: str, settings: dict[str, str], model_type: str
) -> None:
    """Of `transformers` 5, which other classes obey as they are named. A changed file shows what is followed."""
    folder = copied(name, **settings)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    replaced = {"type": "Replace", "pattern": {"String": "e"}, "content": "a"}
    edit(folder / "tokenizer.json", lambda definition: definition.update(normalizer=replaced))
    theirs = AutoTokenizer.from_pretrained(folder)
    for rules in ("agreeing", "class", "file"):
        ours = load_tokenizer(str(folder), rules)
        for text in documents_of_all_sorts(20, seed=9):
            if not any(piece in text for piece in ours.names.by_role().values()):
                assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False).input_ids


def test_a_class_with_another_kind_of_vocabulary_is_a_question(copied: Callable[..., Path]) -> None:
    """`BertTokenizer` makes WordPiece of a list of words, and splits otherwise."""
    folder = copied("smiles", tokenizer_class="BertTokenizer")
    with pytest.raises(TokenizerError, match="BertTokenizer"):
        load_tokenizer(str(folder), "agreeing")
    by_class, theirs = load_tokenizer(str(folder), "class"), AutoTokenizer.from_pretrained(folder)
    assert (by_class.kind, load_tokenizer(str(folder), "file").kind) == ("wordpiece", "wordlevel")
    for text in ("c1ccccc1 [nH] Cl", "C(=O)N", "x"):
        assert by_class.encode(text).tolist() == theirs(text, add_special_tokens=False).input_ids


def test_what_only_the_vocabulary_shows_is_found(copied: Callable[..., Path]) -> None:
    folder = copied("saved-roberta")
    edit(folder / "tokenizer.json", _one_piece_changed)
    with pytest.raises(TokenizerError, match="RobertaTokenizer"):
        load_tokenizer(str(folder), "agreeing")


@pytest.mark.parametrize("named", [None, "MyOwnTokenizer"])
def test_the_rules_of_no_known_class_cannot_be_followed(copied: Callable[..., Path], named: str | None) -> None:
    folder = copied("saved-roberta", tokenizer_class=named)
    with pytest.raises(TokenizerError, match=named or r"\bclass\b"):
        load_tokenizer(str(folder), "class")
    assert load_tokenizer(str(folder), "agreeing").hash == load_tokenizer(str(folder), "file").hash


def _incomplete(definition: dict[str, Any]) -> None:
    named = ("<mask>", "<pad>")
    definition["added_tokens"] = [t for t in definition["added_tokens"] if t["content"] not in named]
    _other_words(definition)


def test_a_completed_decoder_follows_the_rules_that_are_asked_for(copied: Callable[..., Path]) -> None:
    folder = copied("saved-llama-2")
    edit(folder / "tokenizer_config.json", lambda its: [its.pop(role) for role in ("mask_token", "pad_token")])
    edit(folder / "tokenizer.json", _incomplete)
    with pytest.raises(TokenizerError, match="--tokenizer-rules"):
        load_with_all_special_tokens(str(folder), "agreeing")
    by_class, theirs = (
        load_with_all_special_tokens(str(folder), "class"),
        AutoTokenizer.from_pretrained(folder),
    )
    text = "Every rank  reads\tits rows."
    assert by_class.encode(text).tolist() == theirs(text, add_special_tokens=False).input_ids
    assert load_with_all_special_tokens(str(folder), "file").encode(text).tolist() != by_class.encode(text).tolist()


@pytest.mark.parametrize("named", ["RobertaTokenizer", "DebertaTokenizer", "XLMRobertaTokenizer"])
def test_a_class_of_another_kind_of_vocabulary_is_a_question(copied: Callable[..., Path], named: str) -> None:
    folder = str(copied("saved-bert-uncased", tokenizer_class=named))
    for rules in ("agreeing", "class"):
        with pytest.raises(TokenizerError, match=f"{named}.*WordPiece"):
            load_tokenizer(folder, rules)
    assert load_tokenizer(folder, "file").kind == "wordpiece"


@pytest.mark.parametrize("named", ["XLMRobertaTokenizer", "AlbertTokenizer", "T5Tokenizer"])
def test_a_bpe_model_under_a_class_of_unigram_is_refused(tmp_path: Path, named: str) -> None:
    texts = documents_of_all_sorts(60, seed=4)
    files = train_tokenizer("bpe", texts, 2500, allow_fewer_ids=True).save_files()
    (tmp_path / "sentencepiece.bpe.model").write_bytes(files["spiece.model"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named}))
    with pytest.raises(TokenizerError, match="unigram"):
        load_tokenizer(str(tmp_path))
