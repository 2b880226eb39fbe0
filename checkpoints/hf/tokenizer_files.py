"""What a model and its tokenizer's files have to say of each other."""

import json
from collections.abc import Mapping
from typing import Any

from encoder_core.families.build import ModelConfig
from encoder_core.families.xlnet import XlnetConfig

_CONFIG, _DEFINITION = "tokenizer_config.json", "tokenizer.json"
_ROLES = {"bos_token_id": ("bos_token", "cls_token"), "eos_token_id": ("eos_token", "sep_token")}


def for_model(tokenizer_files: Mapping[str, bytes], config: ModelConfig) -> dict[str, bytes]:
    """The files of a tokenizer as they go with a model: it cuts text at the model's length where it is asked to.

    RoBERTa's table of positions has rows before the first one, so tools must not take its size for that length. XLNet's
    rows are padded on the left: its class token is the last one, and transformers classifies by the last position.
    """
    files = dict(tokenizer_files)
    if _CONFIG in files:
        fields = json.loads(files[_CONFIG]) | {"model_max_length": config.max_length}
        if isinstance(config, XlnetConfig):
            fields["padding_side"] = "left"
        files[_CONFIG] = (json.dumps(fields, ensure_ascii=False, indent=2) + "\n").encode()
    return files


def special_token_ids(tokenizer_files: Mapping[str, bytes]) -> dict[str, int]:
    """bos and eos ids for config.json: names from tokenizer_config.json, ids from tokenizer.json.

    Empty where the files do not say; nothing in a masked language model depends on them.
    """
    if not {_DEFINITION, _CONFIG} <= set(tokenizer_files):
        return {}
    configured = json.loads(tokenizer_files[_CONFIG])
    added = json.loads(tokenizer_files[_DEFINITION]).get("added_tokens", [])
    ids = {token["content"]: int(token["id"]) for token in added}
    found = {field: _first(configured, roles) for field, roles in _ROLES.items()}
    return {field: ids[name] for field, name in found.items() if name in ids}


def _first(configured: dict[str, Any], roles: tuple[str, ...]) -> str | None:
    for role in roles:
        token = configured.get(role)
        if token is not None:
            return str(token["content"] if isinstance(token, dict) else token)
    return None
