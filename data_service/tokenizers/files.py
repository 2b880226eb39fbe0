"""A tokenizer as files, in the forms that `transformers.AutoTokenizer` and older tools read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data_service.errors import TokenizerError
from data_service.formats import foreign_json
from data_service.tokenizers.specials import SpecialNames

DEFINITION = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MODEL_CONFIG = "config.json"

Definition = dict[str, Any]  # a parsed tokenizer.json

# transformers' own "no limit": the model's maximum belongs to the model's configuration.
_NO_MAXIMUM = 10**30


def tokenizer_files(definition: Definition, pieces: Sequence[str], names: SpecialNames) -> dict[str, bytes]:
    """Name to content. `tokenizer.json` is the tokenizer; vocabulary files repeat it for other tools."""
    roles = {f"{role}_token": name for role, name in names.by_role().items()}
    # transformers' classes per family rebuild the tokenizer from a vocabulary and constants of theirs; the
    # plain class reads tokenizer.json as it stands.
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _NO_MAXIMUM,
        "clean_up_tokenization_spaces": False,
        "model_input_names": _model_inputs(definition),
        "bos_token": names.cls,
        "eos_token": names.sep,
        **roles,
    }
    special_map = {"bos_token": names.cls, "eos_token": names.sep, **roles}
    return {
        DEFINITION: _json(definition),
        CONFIG: _json(config),
        SPECIAL_TOKENS: _json(special_map),
        **_vocabulary_files(definition, pieces),
    }


def _model_inputs(definition: Definition) -> list[str]:
    # RoBERTa's layout has one token type; a model with one type must not be given a second id.
    has_types = '"type_id": 1' in json.dumps(definition.get("post_processor"))
    return ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]


def _vocabulary_files(definition: Definition, pieces: Sequence[str]) -> dict[str, bytes]:
    model = definition["model"]
    if model.get("type") == "WordPiece":
        return {"vocab.txt": "".join(f"{piece}\n" for piece in pieces).encode()}
    if model.get("ignore_merges"):
        return {}  # these files cannot say it, and would be another tokenizer
    if model.get("type") == "BPE" and '"ByteLevel"' in json.dumps(definition.get("pre_tokenizer")):
        merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
        return {
            "vocab.json": json.dumps(model["vocab"], ensure_ascii=False).encode(),
            "merges.txt": "".join(["#version: 0.2\n", *(f"{merge}\n" for merge in merges)]).encode(),
        }
    return {}


def _json(content: Definition) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()


def text_file(files: Mapping[str, bytes], name: str, where: str) -> str:
    """The text of one of `files`. Raises TokenizerError: not UTF-8."""
    try:
        return files[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{where}: {name} is not UTF-8 text (byte {error.start})", remedy="save the tokenizer again"
        ) from error


def json_file(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    """The JSON object in one of `files`, empty if there is no such file. Raises TokenizerError: not an object."""
    if name not in files:
        return {}
    try:
        content = foreign_json(text_file(files, name, where))
    except ValueError as error:
        raise TokenizerError(
            f"{where}: {name} is not JSON: {error}", remedy="save the tokenizer again"
        ) from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{where}: {name} is not a JSON object", remedy="save the tokenizer again")
    return content
