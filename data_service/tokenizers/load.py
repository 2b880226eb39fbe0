"""Loads and saves tokenizers. Folders may be Maskfleet's or `transformers`', with or without `tokenizer.json` (without
it: `data_service.tokenizers.published`).
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice, pairwise
from weakref import WeakValueDictionary

import tokenizers

from data_service.errors import TokenizerError
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from data_service.tokenizers.files import (
    CONFIG_FILE,
    DEFINITION_FILE,
    MODEL_CONFIG,
    SENTENCEPIECE_FILES,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILES,
    TRAINING_REPORT,
    VOCABULARY_FILES,
    TokenizerRules,
    json_file,
    library_errors,
    text_file,
)
from data_service.tokenizers.published import default_special_tokens, definition_by_class, read_published
from data_service.tokenizers.specials import added_token, find_known_name, row_template, token_name
from data_service.tokenizers.tokenizer import Tokenizer

PROBE_TEXTS = (
    *(
        "Café",
        "ÄÖÜ straße",
        "\tif x:\r\n        return  1\n\n",
        "``a'' 'b' don't (c-d) e_f",
        "1234567 3.14",
        " a ",
    ),
    *(
        "a\u0301 \uac00 \u1100\u1161",
        "日本語とカタカナ",
        "\ufb01 \uff12 \u2460",
        "x\u200cy z\u200dw",
        "नमस्ते",
        "🙂!",
    ),
    "ab" * 60,
)
"""Texts on which the classes of `transformers` and a `tokenizer.json` are known to differ."""
_PROBED_PIECES = 256  # about how many vocabulary pieces are compared besides `PROBE_TEXTS`
# Every pickle since protocol 2 begins with this byte; UTF-8 text and SentencePiece models never do.
_PICKLE_STARTS = b"\x80"
# For tokenizers of decoders, by role: the setting whose token also takes the role; the token to append for the role.
_ENCLOSING_ROLE_KEYS = {"cls": "bos_token", "sep": "eos_token"}
_APPENDED_TOKENS = {"unk": "[UNK]", "pad": "[PAD]", "mask": "[MASK]"}

_saved_tokenizers: WeakValueDictionary[str, Tokenizer] = WeakValueDictionary()  # by URI of the folder


def load_tokenizer(uri: str, rules: TokenizerRules = "file") -> Tokenizer:
    """Return the tokenizer in a folder, local or s3://. `rules`: as for `from_files`.

    Raises:
        TokenizerError: there is no tokenizer, or it cannot be used.
        StoreError: the store cannot be read.
    """
    store = open_store(uri)
    return from_files(read_files(store), where=store.uri, rules=rules)


def load_with_all_special_tokens(uri: str, rules: TokenizerRules = "file") -> Tokenizer:
    """Return the tokenizer in a folder, with missing special tokens appended (see `complete_from_files`).

    Raises as `load_tokenizer`, and TokenizerError: neither `cls` and `sep` nor `bos` and `eos` tokens are configured.
    """
    store = open_store(uri)
    return complete_from_files(read_files(store), where=store.uri, rules=rules)


def read_files(folder: Store) -> dict[str, bytes]:
    """Return the contents of the tokenizer files in `folder`, by name. Raises StoreError: a file cannot be read."""
    found = {name: _get_if_present(folder, name) for name in (*TOKENIZER_FILES, MODEL_CONFIG)}
    return {name: content for name, content in found.items() if content is not None}


def find_tokenizer(folders: Iterable[Store], load: Callable[[str], Tokenizer] = load_tokenizer) -> Tokenizer | None:
    """Return the tokenizer in the first folder that holds one, read with `load`; None if no folder does. Raises as
    `load`."""
    return next((load(store.uri) for store in folders if holds_tokenizer(store)), None)


def holds_tokenizer(folder: Store) -> bool:
    """Return whether `folder` holds a tokenizer. Raises StoreError: the store cannot be read."""
    return any(folder.size(name) is not None for name in VOCABULARY_FILES)


def save_tokenizer(tokenizer: Tokenizer, uri: str) -> None:
    """Write a tokenizer's files into a folder, `tokenizer.json` last, so that an incomplete tokenizer cannot be loaded.
    Then leftovers of killed writers are deleted, unless the folder holds other files, which may still be written."""
    store = open_store(uri)
    files = tokenizer.save_files()
    for name in sorted(files, key=lambda name: name == DEFINITION_FILE):
        store.put(name, files[name])
    if all(entry.key in files for entry in islice(store.list(), len(files) + 1)):
        store.remove_leftovers("", older_than_key=DEFINITION_FILE)
    _saved_tokenizers[store.uri] = tokenizer


def load_cached_tokenizer(uri: str) -> Tokenizer:
    """Return the tokenizer in a folder, from memory if this process saved it there and still uses it. Raises as
    `load_tokenizer`."""
    return _saved_tokenizers.get(uri) or load_tokenizer(uri)


def from_files(files: Mapping[str, bytes], *, where: str = "tokenizer", rules: TokenizerRules = "file") -> Tokenizer:
    """Return the tokenizer that files describe. `files`: contents by name.

    `tokenizer.json` is read if present; else a WordPiece `vocab.txt`, a byte-level `vocab.json` with
    `merges.txt`, or a SentencePiece model, by the rules of its `transformers` class.

    Args:
        files: files as `Tokenizer.save_files` returns them, or of a folder in the `transformers` format.
        where: name of the folder in errors.
        rules: what to follow if `tokenizer.json` and the class that the folder names differ. "file": the file, as in
            transformers 4; "class": the class, as in transformers 5; "agreeing": neither, raise TokenizerError.

    Raises:
        TokenizerError: files are missing, damaged, pickled, or not a tokenizer's; `tokenizer.json` and the named class
            differ; or the rules of the named class are needed but unknown.
    """
    for name, content in files.items():
        if content.startswith(_PICKLE_STARTS):
            raise TokenizerError(
                f"{where}: {name} is a pickle, which could run code when read",
                remedy="save the tokenizer with transformers' save_pretrained and give that folder",
            )
    kept = {name: files[name] for name in (*SENTENCEPIECE_FILES, TRAINING_REPORT) if name in files}
    roles = default_special_tokens(files, where) | configured_special_tokens(files, where)
    return Tokenizer(choose_definition(files, where, rules), roles, model_files=kept, where=where)


def complete_from_files(
    files: Mapping[str, bytes], *, where: str = "tokenizer", rules: TokenizerRules = "file"
) -> Tokenizer:
    """Return the tokenizer that files describe, as `from_files`, with missing special tokens appended.

    The tokenizer of a decoder such as Llama often has no mask or padding token. Then the missing ones of [UNK], [PAD]
    and [MASK] get the ids after the last one, so that existing ids stay; the configured `bos_token` and `eos_token`
    become cls and sep; and a row is cls, text, sep.

    Raises:
        TokenizerError: as `from_files`, or neither cls and sep nor bos and eos tokens are configured.
    """
    text, configured = choose_definition(files, where, rules), configured_special_tokens(files, where)
    with library_errors(where):
        codec = tokenizers.Tokenizer.from_str(text)
    vocabulary = codec.get_vocab(with_added_tokens=True)
    roles = {
        role: _special_token_name(role, vocabulary, configured) for role in (*_ENCLOSING_ROLE_KEYS, *_APPENDED_TOKENS)
    }
    if None not in roles.values():
        return from_files(files, where=where, rules=rules)
    for role, key in _ENCLOSING_ROLE_KEYS.items():
        roles[role] = roles[role] or token_name(configured.get(key))
        if roles[role] not in vocabulary:
            raise TokenizerError(
                f"{where}: no token begins or ends a row: neither {role}_token nor {key} is configured",
                remedy=f"set {key} in tokenizer_config.json to a token of the vocabulary",
            )
    missing = [role for role, name in roles.items() if name is None]
    codec.add_special_tokens([added_token(_APPENDED_TOKENS[role]) for role in missing])
    roles |= {role: _APPENDED_TOKENS[role] for role in missing}
    cls, sep = str(roles["cls"]), str(roles["sep"])
    codec.post_processor = row_template("bert", (cls, vocabulary[cls]), (sep, vocabulary[sep]))
    return Tokenizer(codec.to_str(), {f"{role}_token": name for role, name in roles.items()}, where=where)


def _special_token_name(role: str, vocabulary: Mapping[str, int], configured: Mapping[str, object]) -> str | None:
    name = token_name(configured.get(f"{role}_token"))
    return name if name is not None else find_known_name(role, vocabulary)


def configured_special_tokens(files: Mapping[str, bytes], where: str) -> dict[str, object]:
    """Return a folder's settings, such as `cls_token` and `bos_token`. Raises TokenizerError: a file is damaged."""
    config = json_file(files, CONFIG_FILE, where)
    return json_file(files, SPECIAL_TOKENS_FILE, where) | {k: v for k, v in config.items() if v is not None}


def choose_definition(files: Mapping[str, bytes], where: str, rules: TokenizerRules = "file") -> str:
    """Return the text of the `tokenizer.json` to use: the folder's, or a converted one. Raises as `from_files`."""
    if DEFINITION_FILE in files:
        text = text_file(files, DEFINITION_FILE, where)
        made = None if rules == "file" else definition_by_class(files, where, only_if_known=rules == "class")
        if made is None or rules == "class":
            return text if made is None else made[1]
        _check_same_tokens(text, made[1], made[0], where)
        return text
    with library_errors(where, "not a tokenizer"):
        published = read_published(files, where)
        if published is not None:
            return published.to_str()
    raise TokenizerError(
        f"{where}: there is no tokenizer: neither {DEFINITION_FILE} nor a vocabulary",
        remedy="check the path, or train a tokenizer with `maskfleet tokenizer train`",
    )


def _check_same_tokens(by_file: str, by_class: str, named: str, where: str) -> None:
    """Check that two definitions give equal ids for `PROBE_TEXTS`, some vocabulary pieces, and pairs of pieces.

    Raises:
        TokenizerError: the ids differ.
    """
    with library_errors(where):
        codecs = [tokenizers.Tokenizer.from_str(definition) for definition in (by_file, by_class)]
        pieces = sorted(codecs[0].get_vocab(with_added_tokens=False))
        pieces = pieces[:: max(1, len(pieces) // _PROBED_PIECES)]
        texts = [*PROBE_TEXTS, *pieces, *map("".join, pairwise(pieces))]
        for codec in codecs:
            codec.no_truncation()
            codec.no_padding()
        first, second = (codec.encode_batch(texts, add_special_tokens=False) for codec in codecs)
    for text, ours, theirs in zip(texts, first, second, strict=True):
        if ours.ids != theirs.ids:
            raise TokenizerError(
                f"{where}: {DEFINITION_FILE} and {named}, the class that the folder names, treat text in "
                "different ways: "
                f"{text!r} is {ours.tokens} by the file, {theirs.tokens} by the class",
                remedy="give the rules that the model was trained with: --tokenizer-rules file (the file, as "
                "transformers 4 does) or --tokenizer-rules class (the class, as transformers 5 does)",
            )


def _get_if_present(store: Store, name: str) -> bytes | None:
    try:
        return store.get(name)
    except KeyMissing:
        return None
