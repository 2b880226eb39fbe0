"""Read a tokenizer from its files: ours, or a folder in the `transformers` format."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from data_service.errors import TokenizerError
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from data_service.tokenizers.files import CONFIG, DEFINITION, SPECIAL_TOKENS
from data_service.tokenizers.spm import convert_model, parse_model
from data_service.tokenizers.tokenizer import Tokenizer

_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt")
MODEL_FILES = ("spiece.model", "spm.model", "tokenizer.model", "sentencepiece.bpe.model")
_FILES = (DEFINITION, CONFIG, SPECIAL_TOKENS, *_VOCABULARIES, *MODEL_FILES)
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
    `merges.txt`, or a SentencePiece model, read as SentencePiece itself reads it.

    Args:
        files: what `Tokenizer.save_files` returned, or a folder of the `transformers` format.
        where: what errors call it.

    Raises:
        TokenizerError: missing, damaged, pickled or foreign files.
    """
    for name, content in files.items():
        if content.startswith(_PICKLE):
            raise TokenizerError(
                f"{where}: {name} is a pickle, which could run code when read",
                remedy="save the tokenizer with transformers' save_pretrained and give that folder",
            )
    config = _mapping(files, CONFIG, where)
    configured = _mapping(files, SPECIAL_TOKENS, where) | {k: v for k, v in config.items() if v is not None}
    kept = {name: files[name] for name in MODEL_FILES if name in files}
    return Tokenizer(_definition(files, config, where), configured, model_files=kept, where=where)


def _definition(files: Mapping[str, bytes], config: Mapping[str, Any], where: str) -> str:
    if DEFINITION in files:
        return _text(files, DEFINITION, where)
    if "vocab.txt" in files:
        return _wordpiece(_text(files, "vocab.txt", where), config, where).to_str()
    if "vocab.json" in files and "merges.txt" in files:
        vocabulary = _mapping(files, "vocab.json", where)
        return _byte_bpe(vocabulary, _text(files, "merges.txt", where), where).to_str()
    for name in MODEL_FILES:
        if name in files:
            return convert_model(parse_model(files[name], f"{where}: {name}"), mask=None).to_str()
    raise TokenizerError(
        f"{where}: no tokenizer here: neither {DEFINITION} nor a vocabulary",
        remedy="check the path, or make one with `maskfleet tokenizer train`",
    )


def _wordpiece(vocabulary: str, config: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    """BERT's tokenizer from its vocabulary; unset options mean what they mean to transformers (uncased)."""
    ids = {piece: i for i, piece in enumerate(vocabulary.removesuffix("\n").split("\n"))}
    unknown = str(config.get("unk_token") or "[UNK]")
    if unknown not in ids:
        raise TokenizerError(
            f"{where}: vocab.txt has no {unknown}",
            remedy="give the vocab.txt of a BERT model, one piece a line",
        )
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(config.get("do_lower_case", True)),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer


def _byte_bpe(vocabulary: dict[str, int], merges: str, where: str) -> tokenizers.Tokenizer:
    lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    missing = next((pair for pair in pairs if not {*pair, "".join(pair)} <= vocabulary.keys()), None)
    if missing is not None:
        raise TokenizerError(
            f"{where}: merges.txt joins {missing[0]!r} and {missing[1]!r}, which vocab.json does not hold",
            remedy="give the vocab.json and merges.txt that were saved together",
        )
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _get(store: Store, name: str) -> bytes | None:
    try:
        return store.get(name)
    except KeyMissing:
        return None


def _text(files: Mapping[str, bytes], name: str, where: str) -> str:
    try:
        return files[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{where}: {name} is not UTF-8 text (byte {error.start})", remedy="save the tokenizer again"
        ) from error


def _mapping(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if name not in files:
        return {}
    try:
        content = json.loads(_text(files, name, where))
    except json.JSONDecodeError as error:
        raise TokenizerError(
            f"{where}: {name} is not JSON: {error}", remedy="save the tokenizer again"
        ) from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{where}: {name} is not a JSON object", remedy="save the tokenizer again")
    return content
