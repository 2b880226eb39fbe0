"""Folders that are not a usable tokenizer: each says what is wrong, where, and what to do."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from data_service.errors import TokenizerError
from data_service.tokenizers.load import from_files, load_tokenizer
from data_service.tokenizers.tokenizer import Kind, Tokenizer


@pytest.fixture
def files(trained: Callable[[Kind], Tokenizer]) -> dict[str, bytes]:
    return trained("byte_bpe").save_files()


def _definition(files: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    return {"tokenizer.json": json.dumps(json.loads(files["tokenizer.json"]) | changes).encode()}


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=f"{tmp_path}.*no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_pickle_is_refused_unread(files: dict[str, bytes]) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is a pickle"):
        from_files({"tokenizer.json": pickle.dumps(files)})


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"model": 3}', b'{"model": {"type": "BPE"}}', b"\xff\xfe"]
)
def test_a_damaged_definition_is_an_error_with_its_place(content: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"definition|UTF-8") as raised:
        from_files({"tokenizer.json": content}, where="s3://bucket/tok")
    assert "s3://bucket/tok" in raised.value.problem


def test_a_truncated_definition_is_an_error(files: dict[str, bytes]) -> None:
    with pytest.raises(TokenizerError, match="definition"):
        from_files({"tokenizer.json": files["tokenizer.json"][:-100]})


def test_a_kind_that_is_not_ours_is_named(files: dict[str, bytes]) -> None:
    word_level = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
    with pytest.raises(TokenizerError, match="WordLevel"):
        from_files(_definition(files, model=word_level, added_tokens=[], post_processor=None))


def test_a_role_outside_the_vocabulary(files: dict[str, bytes]) -> None:
    config = {"tokenizer_config.json": b'{"mask_token": "<nope>"}'}
    with pytest.raises(TokenizerError, match=r"mask_token is '<nope>'"):
        from_files(files | config)


def test_a_tokenizer_without_a_mask(files: dict[str, bytes]) -> None:
    definition = json.loads(files["tokenizer.json"])
    definition["added_tokens"] = [
        token for token in definition["added_tokens"] if token["content"] != "<mask>"
    ]
    vocabulary = {
        ("blank" if piece == "<mask>" else piece): i for piece, i in definition["model"]["vocab"].items()
    }
    definition["model"]["vocab"] = vocabulary
    with pytest.raises(TokenizerError, match="no mask token"):
        from_files({"tokenizer.json": json.dumps(definition).encode()})


def test_roles_given_as_objects_and_in_either_file(files: dict[str, bytes]) -> None:
    config = {"tokenizer_config.json": b'{"unk_token": {"content": "the"}, "cls_token": null}'}
    special = {"special_tokens_map.json": b'{"unk_token": "<unk>", "pad_token": "a"}'}
    tokenizer = from_files(_definition(files) | config | special)
    assert (tokenizer.names.unk, tokenizer.names.pad, tokenizer.names.cls) == ("the", "a", "<s>")


def test_merges_from_another_vocabulary(files: dict[str, bytes]) -> None:
    vocabulary = {"vocab.json": files["vocab.json"], "merges.txt": b"#version: 0.2\nqq zz\n"}
    with pytest.raises(TokenizerError, match=r"merges\.txt joins 'qq' and 'zz'"):
        from_files(vocabulary)


def test_a_vocabulary_without_the_unknown_token() -> None:
    with pytest.raises(TokenizerError, match=r"vocab\.txt has no \[UNK\]"):
        from_files({"vocab.txt": b"a\nb\n"})


@pytest.mark.parametrize("content", [b"not a model", b""])
def test_a_damaged_sentencepiece_model(content: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"spiece\.model: not a"):
        from_files({"spiece.model": content})
