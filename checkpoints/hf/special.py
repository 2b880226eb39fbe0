"""Ids of special tokens for config.json, from the tokenizer's own files."""

import json
from collections.abc import Mapping
from typing import Any

_ROLES = {"bos_token_id": ("bos_token", "cls_token"), "eos_token_id": ("eos_token", "sep_token")}


def special_token_ids(tokenizer_files: Mapping[str, bytes]) -> dict[str, int]:
    """bos and eos ids: names from tokenizer_config.json, ids from tokenizer.json.

    Empty where the files do not say; nothing in a masked language model depends on them.
    """
    if not {"tokenizer.json", "tokenizer_config.json"} <= set(tokenizer_files):
        return {}
    configured = json.loads(tokenizer_files["tokenizer_config.json"])
    added = json.loads(tokenizer_files["tokenizer.json"]).get("added_tokens", [])
    ids = {token["content"]: int(token["id"]) for token in added}
    found = {field: _first(configured, roles) for field, roles in _ROLES.items()}
    return {field: ids[name] for field, name in found.items() if name in ids}


def _first(configured: dict[str, Any], roles: tuple[str, ...]) -> str | None:
    for role in roles:
        token = configured.get(role)
        if token is not None:
            return str(token["content"] if isinstance(token, dict) else token)
    return None
