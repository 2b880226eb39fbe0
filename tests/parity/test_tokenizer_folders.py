"""Tokenizers as people have them: the ids of `transformers.AutoTokenizer`, or a refusal that names the class; and what
decides where a folder's `tokenizer.json` and its class do not agree.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from transformers import AutoTokenizer

from data_service.errors import TokenizerError
from data_service.tokenizers.load import load_tokenizer, save_tokenizer
from data_service.tokenizers.specials import END_OF_DOCUMENT
from tests.support.data.all_sorts import documents_of_all_sorts
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


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_the_class(made: Callable[[str], Path], name: str) -> None:
    folder = made(name)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder), "agreeing")
    assert ours.vocab_size == len(theirs)
    names = [piece for role, piece in ours.names.by_role().items() if role != "unk"] + [END_OF_DOCUMENT]
    further = [piece for i in np.flatnonzero(ours.special_mask) if (piece := ours.piece(int(i))) not in names]
    random = Random(name)
    for text in documents_of_all_sorts(80, seed=5):
        if further:  # other special tokens, in any place
            at = random.randrange(len(text))
            text = text[:at] + random.choice(["", " "]) + random.choice(further) + text[at:]
        if not any(piece in text for piece in names):
            assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_saved_is_no_question_any_more(
    made: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
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
def test_a_class_that_we_do_not_know_is_refused_by_name(
    made: Callable[[str], Path], tmp_path: Path, name: str, named: str
) -> None:
    shutil.copytree(made(name), tmp_path / "folder")
    (tmp_path / "folder/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named}))
    with pytest.raises(TokenizerError, match=named):
        load_tokenizer(str(tmp_path / "folder"))


def test_a_type_of_model_that_we_do_not_know_is_refused_by_name(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(made("spanbert"), tmp_path / "folder")
    (tmp_path / "folder/config.json").write_text(json.dumps({"model_type": "roc_bert"}))
    with pytest.raises(TokenizerError, match="roc_bert"):
        load_tokenizer(str(tmp_path / "folder"))


def _no_lowercase(definition: dict[str, dict[str, object]]) -> None:
    definition["normalizer"] = definition["normalizer"] | {"lowercase": False}


def _other_words(definition: dict[str, dict[str, object]]) -> None:
    definition["pre_tokenizer"] = {"type": "WhitespaceSplit"}


def _no_prefix(definition: dict[str, dict[str, object]]) -> None:
    definition["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("saved-bert-uncased", _no_lowercase),
        ("saved-bert-uncased", _other_words),
        ("saved-roberta", _no_prefix),
        ("saved-xlm-roberta", _other_words),
        ("saved-deberta-v3", _other_words),
    ],
)
def test_a_file_and_a_class_that_disagree_are_a_question(
    made: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    change: Callable[[dict[str, dict[str, object]]], None],
) -> None:
    """The class's answer is that of `transformers` 5, the file's that of version 4 and of the plain class."""
    shutil.copytree(made(name), tmp_path / "folder")
    path, config = tmp_path / "folder/tokenizer.json", tmp_path / "folder/tokenizer_config.json"
    definition = json.loads(path.read_text())
    change(definition)
    path.write_text(json.dumps(definition))
    by_class, by_file = (load_tokenizer(str(tmp_path / "folder"), rules) for rules in ("class", "file"))
    with pytest.raises(TokenizerError) as raised:
        load_tokenizer(str(tmp_path / "folder"), "agreeing")
    assert all(f"--tokenizer-rules {rules}" in str(raised.value) for rules in ("class", "file"))
    assert by_class.hash != by_file.hash
    theirs = AutoTokenizer.from_pretrained(tmp_path / "folder")
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    plain = AutoTokenizer.from_pretrained(tmp_path / "folder")
    differing = 0
    for text in documents_of_all_sorts(60, seed=8):
        assert by_class.encode(text).tolist() == theirs(text, add_special_tokens=False).input_ids
        assert by_file.encode(text).tolist() == plain(text, add_special_tokens=False).input_ids
        differing += not np.array_equal(by_class.encode(text), by_file.encode(text))
    assert differing > 0
