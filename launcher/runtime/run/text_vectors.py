"""Copies the modules of a SentenceTransformer folder that turn the encoder's hidden states into text embeddings.

Training does not change these modules. A run that starts from such a folder keeps a copy of them, so that its exports
are SentenceTransformer folders too, even if the original folder is deleted.
"""

import json
from pathlib import Path

from data_service.formats import parse_json
from data_service.store.base import Store
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from launcher.runtime.recipe.schema import SCRATCH, TEACHER, Recipe
from launcher.runtime.run.record import RECORD_FILE

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
_RUN_FOLDER = "sentence_transformer"  # folder of the copies in a run's store
_ENCODER_FILE = "sentence_bert_config.json"
_TOKENIZER_FILE = "tokenizer_config.json"
_MAX_REAL_LENGTH = 1 << 30  # transformers writes a larger number for "no limit"
_COPIED_FILES = (SETTINGS_FILE, _ENCODER_FILE, "sentence_roberta_config.json", "sentence_xlnet_config.json")


def keep_modules(recipe: Recipe, store: Store) -> None:
    """Copy the SentenceTransformer modules of `recipe.start` (a folder or run), if it has any, into the run at `store`.

    Raises:
        ModelError: modules.json or a settings file is damaged.
        StoreError: a store cannot be read or written.
    """
    if recipe.start in (SCRATCH, TEACHER):
        return
    start = open_store(recipe.start)
    store_modules(store, read_kept_modules(start) if start.size(RECORD_FILE) is not None else _read_modules(start))


def store_modules(store: Store, files: dict[str, bytes]) -> None:
    """Store the files of modules in the run at `store`, for `read_kept_modules`."""
    for key, content in files.items():
        store.put(f"{_RUN_FOLDER}/{key}", content)


def read_kept_modules(store: Store) -> dict[str, bytes]:
    """Return the files of the modules that a run keeps, by relative path; empty if it did not start from a
    SentenceTransformer folder."""
    keys = [entry.key for entry in store.list(f"{_RUN_FOLDER}/")]
    return {key.removeprefix(f"{_RUN_FOLDER}/"): store.get(key) for key in keys}


def write_modules(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of the modules into `folder`, next to the exported encoder."""
    for key, content in files.items():
        (folder / key).parent.mkdir(exist_ok=True)
        (folder / key).write_bytes(content)


def find_prompts(files: dict[str, bytes]) -> dict[str, str]:
    """Return the prompts of SentenceTransformers by name: prefixes of the texts to encode."""
    prompts = _json_fields(files.get(SETTINGS_FILE, b"{}"), SETTINGS_FILE).get("prompts")
    return {str(name): str(text) for name, text in prompts.items()} if isinstance(prompts, dict) else {}


def _read_modules(folder: Store) -> dict[str, bytes]:
    """Return the files of the modules in a SentenceTransformer folder, by relative path; empty if it is none."""
    if folder.size(MODULES_FILE) is None:
        return {}
    found = {name: folder.get(name) for name in (MODULES_FILE, *_COPIED_FILES) if folder.size(name) is not None}
    try:
        paths = [str(module["path"]) for module in parse_json(found[MODULES_FILE])]
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{folder.uri.rstrip('/')}/{MODULES_FILE} is damaged: {error}", remedy="download the folder again"
        ) from error
    for path in paths:
        # Path "" is the encoder, whose files an export writes itself.
        if path and Path(path).name == path:
            found |= {entry.key: folder.get(entry.key) for entry in folder.list(f"{path}/")}
    return found | _settings_with_length(
        folder,
        _json_fields(found.get(_ENCODER_FILE, b"{}"), f"{folder.uri.rstrip('/')}/{_ENCODER_FILE}"),
    )


def _json_fields(data: bytes, where: str) -> dict[str, object]:
    try:
        found = parse_json(data)
    except ValueError as error:
        raise ModelError(f"{where} is not JSON: {error}", remedy="download the folder again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{where} is not a JSON object", remedy="download the folder again")
    return found


def _settings_with_length(folder: Store, fields: dict[str, object]) -> dict[str, bytes]:
    """Return the encoder's settings file with `max_seq_length` added from the tokenizer's settings, where version 6 of
    SentenceTransformers stores it; empty if nothing must be added."""
    if "max_seq_length" in fields or folder.size(_TOKENIZER_FILE) is None:
        return {}
    length = _json_fields(folder.get(_TOKENIZER_FILE), f"{folder.uri.rstrip('/')}/{_TOKENIZER_FILE}").get(
        "model_max_length"
    )
    known = isinstance(length, int) and length < _MAX_REAL_LENGTH
    return {_ENCODER_FILE: json.dumps(fields | {"max_seq_length": length}).encode()} if known else {}
