"""Copies the modules of a SentenceTransformer folder that turn the encoder's states into vectors of texts.

Training does not change them. A run that starts from such a folder keeps a copy, so that its exports are
SentenceTransformer folders too, even if the original folder is deleted.
"""

import json
from pathlib import Path

from data_service.formats import parse_json
from data_service.store.base import Store
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from launcher.runtime.recipe.schema import SCRATCH, TEACHER, Recipe
from launcher.runtime.run.record import RECORD

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
_RECORD_NAME = "sentence_transformer"
_ENCODER = "sentence_bert_config.json"
_TOKENIZER = "tokenizer_config.json"
_NO_LENGTH = 1 << 30  # lengths above this mean "no limit", for which transformers writes a huge number
_COPIED_FILES = (SETTINGS, _ENCODER, "sentence_roberta_config.json", "sentence_xlnet_config.json")


def keep_modules(recipe: Recipe, store: Store) -> None:
    """Copy the modules, if any, of the folder or run that `recipe` starts from into the run at `store`.

    Raises:
        ModelError: modules.json or a settings file is damaged.
        StoreError: a store cannot be read or written.
    """
    if recipe.start in (SCRATCH, TEACHER):
        return
    start = open_store(recipe.start)
    store_modules(store, kept_modules(start) if start.size(RECORD) is not None else _modules_in(start))


def store_modules(store: Store, files: dict[str, bytes]) -> None:
    """Store the files of modules in a run, where `kept_modules` reads them."""
    for key, content in files.items():
        store.put(f"{_RECORD_NAME}/{key}", content)


def kept_modules(store: Store) -> dict[str, bytes]:
    """Return the files of the modules that a run keeps, by path in the folder. Empty if the run did not start from a
    SentenceTransformer folder."""
    keys = [entry.key for entry in store.list(f"{_RECORD_NAME}/")]
    return {key.removeprefix(f"{_RECORD_NAME}/"): store.get(key) for key in keys}


def write_modules(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of the modules beside the exported encoder in `folder`."""
    for key, content in files.items():
        (folder / key).parent.mkdir(exist_ok=True)
        (folder / key).write_bytes(content)


def prompts_in(files: dict[str, bytes]) -> dict[str, str]:
    """Return the prompts, texts that are put before the text to encode, by name."""
    prompts = _fields(files.get(SETTINGS, b"{}"), SETTINGS).get("prompts")
    return {str(name): str(text) for name, text in prompts.items()} if isinstance(prompts, dict) else {}


def _modules_in(folder: Store) -> dict[str, bytes]:
    if folder.size(MODULES) is None:
        return {}
    found = {name: folder.get(name) for name in (MODULES, *_COPIED_FILES) if folder.size(name) is not None}
    try:
        paths = [str(module["path"]) for module in parse_json(found[MODULES])]
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{folder.uri.rstrip('/')}/{MODULES} is damaged: {error}", remedy="fetch the folder again"
        ) from error
    for path in paths:
        # Not the encoder, whose path is "": an export writes its own files.
        if path and Path(path).name == path:
            found |= {entry.key: folder.get(entry.key) for entry in folder.list(f"{path}/")}
    return found | _with_length(
        folder,
        _fields(found.get(_ENCODER, b"{}"), f"{folder.uri.rstrip('/')}/{_ENCODER}"),
    )


def _fields(data: bytes, where: str) -> dict[str, object]:
    try:
        found = parse_json(data)
    except ValueError as error:
        raise ModelError(f"{where} is not JSON: {error}", remedy="fetch the folder again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{where} is not a JSON object", remedy="fetch the folder again")
    return found


def _with_length(folder: Store, fields: dict[str, object]) -> dict[str, bytes]:
    """Return the encoder's settings file with the longest length of texts, if the file lacks it: version 6 of
    SentenceTransformers keeps the length with the tokenizer."""
    if "max_seq_length" in fields or folder.size(_TOKENIZER) is None:
        return {}
    length = _fields(folder.get(_TOKENIZER), f"{folder.uri.rstrip('/')}/{_TOKENIZER}").get("model_max_length")
    known = isinstance(length, int) and length < _NO_LENGTH
    return {_ENCODER: json.dumps(fields | {"max_seq_length": length}).encode()} if known else {}
