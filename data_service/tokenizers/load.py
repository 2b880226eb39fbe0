"""Read a tokenizer from its files: ours, or a folder in the `transformers` format."""

from collections.abc import Iterable, Mapping

from data_service.errors import TokenizerError
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from data_service.tokenizers.files import (
    ADDED_TOKENS,
    CONFIG,
    DEFINITION,
    MODEL_CONFIG,
    SPECIAL_TOKENS,
    json_file,
    text_file,
)
from data_service.tokenizers.published import MODEL_FILES, read_published
from data_service.tokenizers.tokenizer import Tokenizer

_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt")
_FILES = (DEFINITION, CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, MODEL_CONFIG, *_VOCABULARIES, *MODEL_FILES)
_PICKLE = b"\x80"  # how every pickle since protocol 2 begins; no UTF-8 text and no SentencePiece model does


def load_tokenizer(uri: str) -> Tokenizer:
    """The tokenizer in a folder, local or s3://.

    Raises:
        TokenizerError: no tokenizer there, or one that cannot be used.
        StoreError: a store that cannot be read.
    """
    store = open_store(uri)
    files = {name: content for name in _FILES if (content := _get(store, name)) is not None}
    return from_files(files, where=store.uri)


def find_tokenizer(folders: Iterable[Store]) -> Tokenizer | None:
    """The tokenizer in the first of these folders that holds one, None if none does. Raises as `load_tokenizer`."""
    return next((load_tokenizer(store.uri) for store in folders if holds_tokenizer(store)), None)


def holds_tokenizer(folder: Store) -> bool:
    """Whether a tokenizer, of ours or of transformers, lies in `folder`. Raises StoreError."""
    decisive = (DEFINITION, "vocab.txt", "vocab.json", *MODEL_FILES)
    return any(folder.size(name) is not None for name in decisive)


def save_tokenizer(tokenizer: Tokenizer, uri: str) -> None:
    """Write a tokenizer's files into a folder; `tokenizer.json`, which makes it loadable, last."""
    store = open_store(uri)
    files = tokenizer.save_files()
    for name in sorted(files, key=lambda name: name == DEFINITION):
        store.put(name, files[name])


def from_files(files: Mapping[str, bytes], *, where: str = "tokenizer") -> Tokenizer:
    """Build from file contents by name.

    `tokenizer.json` decides if it is there; else a WordPiece `vocab.txt`, a byte-level `vocab.json` with
    `merges.txt`, or a SentencePiece model, each read as the class of its family in `transformers` reads it.

    Args:
        files: what `Tokenizer.save_files` returned, or a folder of the `transformers` format.
        where: its name in errors.

    Raises:
        TokenizerError: missing, damaged, pickled or foreign files.
    """
    for name, content in files.items():
        if content.startswith(_PICKLE):
            raise TokenizerError(
                f"{where}: {name} is a pickle, which could run code when read",
                remedy="save the tokenizer with transformers' save_pretrained and give that folder",
            )
    config = json_file(files, CONFIG, where)
    configured = json_file(files, SPECIAL_TOKENS, where) | {k: v for k, v in config.items() if v is not None}
    kept = {name: files[name] for name in MODEL_FILES if name in files}
    return Tokenizer(_definition(files, where), configured, model_files=kept, where=where)


def _definition(files: Mapping[str, bytes], where: str) -> str:
    if DEFINITION in files:
        return text_file(files, DEFINITION, where)
    published = read_published(files, where)
    if published is None:
        raise TokenizerError(
            f"{where}: no tokenizer here: neither {DEFINITION} nor a vocabulary",
            remedy="check the path, or make one with `maskfleet tokenizer train`",
        )
    return published.to_str()


def _get(store: Store, name: str) -> bytes | None:
    try:
        return store.get(name)
    except KeyMissing:
        return None
