"""What every kind of tokenizer promises, whatever its kind."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_service.tokenizers.load import from_files, load_tokenizer, save_tokenizer
from data_service.tokenizers.tokenizer import Kind, Tokenizer


def test_ids_are_compact_arrays_without_special_tokens(tokenizer: Tokenizer, lines: list[str]) -> None:
    encoded = tokenizer.encode_batch(lines)
    ids = np.concatenate(encoded)
    assert all(array.dtype == np.uint16 for array in encoded)
    assert ids.max() < tokenizer.vocab_size == 1500
    assert not np.isin(ids, _inserted(tokenizer)).any()


def test_special_mask_covers_exactly_the_special_pieces(tokenizer: Tokenizer) -> None:
    names = set(tokenizer.names.by_role().values())
    assert {tokenizer.piece(int(i)) for i in np.flatnonzero(tokenizer.special_mask)} == names
    assert not tokenizer.special_mask.flags.writeable


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_byte_fallback_leaves_nothing_unknown(
    trained: Callable[[Kind], Tokenizer], kind: Kind, lines: list[str]
) -> None:
    tokenizer = trained(kind)
    assert not any((ids == tokenizer.special.unk).any() for ids in tokenizer.encode_batch(lines))
    assert tokenizer.decode(tokenizer.encode("日本語 😀 text")) == "日本語 😀 text"


@pytest.mark.long
def test_saving_loading_and_pickling_keep_everything(tokenizer: Tokenizer, lines: list[str], tmp_path: Path) -> None:
    save_tokenizer(tokenizer, str(tmp_path))
    expected = [ids.tolist() for ids in tokenizer.encode_batch(lines)]
    for copy in (
        load_tokenizer(str(tmp_path)),
        from_files(tokenizer.save_files()),
        pickle.loads(pickle.dumps(tokenizer)),  # noqa: S301  our own object, as Ray sends it
    ):
        assert copy.hash == tokenizer.hash
        assert copy.special == tokenizer.special
        assert copy.save_files() == tokenizer.save_files()
        assert [ids.tolist() for ids in copy.encode_batch(lines)] == expected


def test_hash_follows_the_content(trained: Callable[[Kind], Tokenizer], documents: list[str]) -> None:
    hashes = {trained(kind).hash for kind in ("byte_bpe", "wordpiece", "unigram", "bpe")}
    assert len(hashes) == 4
    files = trained("byte_bpe").save_files()
    respaced = files | {"tokenizer.json": files["tokenizer.json"].replace(b"\n", b" ")}
    cls = {"tokenizer_config.json": b'{"cls_token": "</s>"}'}
    assert from_files(respaced).hash == trained("byte_bpe").hash
    assert from_files(files | cls).hash != trained("byte_bpe").hash


@pytest.mark.long
def test_large_vocabularies_use_uint32(trained: Callable[[Kind], Tokenizer]) -> None:
    definition = json.loads(trained("wordpiece").save_files()["tokenizer.json"])
    definition["model"]["vocab"] |= {f"filler{i}": 1500 + i for i in range(65536 - 1500 + 1)}
    large = from_files({"tokenizer.json": json.dumps(definition).encode()})
    assert large.vocab_size == 65537
    assert large.encode("filler64036").tolist() == [65536]
    assert large.encode("filler64036").dtype == np.uint32


def test_truncation_in_a_file_does_not_cut_documents(
    trained: Callable[[Kind], Tokenizer], documents: list[str]
) -> None:
    definition = json.loads(trained("byte_bpe").save_files()["tokenizer.json"])
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 5,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    cut = from_files({"tokenizer.json": json.dumps(definition).encode()})
    assert len(cut.encode(documents[0])) == len(trained("byte_bpe").encode(documents[0])) > 5
    assert cut.hash == trained("byte_bpe").hash


def _inserted(tokenizer: Tokenizer) -> list[int]:
    special = tokenizer.special
    return [special.cls, special.sep, special.pad, special.mask]
