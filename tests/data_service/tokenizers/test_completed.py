"""A decoder's tokenizer gets the special tokens that it lacks; every id and every text stays as it was."""

import json
import random
from itertools import product
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from data_service.errors import TokenizerError
from data_service.tokenizers.load import (
    complete_from_files,
    from_files,
    load_tokenizer,
    load_with_all_special_tokens,
    save_tokenizer,
)
from data_service.tokenizers.tokenizer import Tokenizer

TEXTS = ["the river, the stone", "maples and lanterns", "Zürich 日本 \n\t 12", "[MASK] <s> </s>", ""]
NAMES = {
    "unk": ("<unk>", "[UNK]"),
    "pad": ("<pad>", "<|finetune_right_pad_id|>"),
    "mask": ("<mask>", "[MASK]"),
}


def decoder(begin: str, end: str, more: dict[str, str], size: int = 290) -> dict[str, bytes]:
    """Files of a byte-level tokenizer whose configuration names what begins and ends a text, and `more` by role."""
    codec = tokenizers.Tokenizer(models.BPE())
    codec.pre_tokenizer, codec.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[begin, end, *more.values()],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    codec.train_from_iterator(TEXTS[:3] * 4, trainer)
    roles = {"bos_token": begin, "eos_token": end} | {f"{role}_token": name for role, name in more.items()}
    return {"tokenizer.json": codec.to_str().encode(), "tokenizer_config.json": json.dumps(roles).encode()}


def test_ids_stay_and_missing_tokens_follow() -> None:
    draws = random.Random(3)
    for held in product((False, True), repeat=3):
        more = {role: draws.choice(NAMES[role]) for role, has in zip(NAMES, held, strict=True) if has}
        begin, end = draws.choice([("<|begin_of_text|>", "<|end_of_text|>"), ("<s>", "</s>"), ("A#", "B#")])
        files = decoder(begin, end, more, draws.choice([270, 280, 300]))
        before = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        found = complete_from_files(files)
        assert found.vocab_size == before.get_vocab_size() + held.count(False)
        assert found.pieces[: before.get_vocab_size()] == tuple(
            before.id_to_token(number) for number in range(before.get_vocab_size())
        )
        assert found.names.by_role() | more == found.names.by_role()
        assert (found.names.cls, found.names.sep) == (begin, end)
        for text in TEXTS:
            if "[MASK]" not in text:
                assert found.encode(text).tolist() == before.encode(text, add_special_tokens=False).ids


def test_what_is_written_is_read_by_us_and_by_transformers(tmp_path: Path) -> None:
    found = complete_from_files(decoder("<|begin_of_text|>", "<|end_of_text|>", {}))
    save_tokenizer(found, str(tmp_path))
    assert load_tokenizer(str(tmp_path)).hash == load_with_all_special_tokens(str(tmp_path)).hash == found.hash
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    special = found.special
    assert (theirs.mask_token_id, theirs.pad_token_id) == (special.mask, special.pad)
    assert theirs("the river")["input_ids"] == [special.cls, *found.encode("the river").tolist(), special.sep]


def test_a_tokenizer_that_lacks_nothing_stays(tokenizer: Tokenizer) -> None:
    files = tokenizer.save_files()
    assert complete_from_files(files).hash == from_files(files).hash == tokenizer.hash


def test_what_encloses_a_row_must_be_known() -> None:
    files = decoder("<|begin_of_text|>", "<|end_of_text|>", {})
    with pytest.raises(TokenizerError, match="_token"):
        from_files(files)
    roles = json.loads(files["tokenizer_config.json"])
    for missing in ("bos_token", "eos_token"):
        config = json.dumps({key: name for key, name in roles.items() if key != missing})
        with pytest.raises(TokenizerError, match=missing):
            complete_from_files(files | {"tokenizer_config.json": config.encode()})
    wrong = json.dumps(roles | {"bos_token": "<|nowhere|>"})
    with pytest.raises(TokenizerError, match="bos_token"):
        complete_from_files(files | {"tokenizer_config.json": wrong.encode()})
