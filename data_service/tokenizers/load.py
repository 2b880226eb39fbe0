"""Reads a tokenizer from our files or from a folder in the `transformers` format, with or without `tokenizer.json`.

Older published folders have only a vocabulary, which does not say how text is normalised and split before pieces are
looked up. The code of each family's class in `transformers` says it (read in version 5), with a few settings of
`tokenizer_config.json`. Here the same steps are combined into one definition, which gives the same ids.

bert (ELECTRA's and SpanBERT's too): `vocab.txt`.
roberta, deberta: `vocab.json` and `merges.txt`.
albert, xlnet: `spiece.model`; text is decomposed, stripped of accents, split at white space.
deberta-v2 (and v3): `spm.model`; the model's own character map is not applied, and [MASK] follows its pieces.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, assert_never

import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from data_service.errors import TokenizerError
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from data_service.tokenizers.files import (
    ADDED_TOKENS,
    CONFIG,
    DECISIVE_FILES,
    DEFINITION,
    MODEL_CONFIG,
    MODEL_FILES,
    SPECIAL_TOKENS,
    TOKENIZER_FILES,
    json_file,
    text_file,
)
from data_service.tokenizers.specials import STYLES, SpecialStyle, row_template, token_name
from data_service.tokenizers.spm import SPACE, convert_model, marked_pieces, parse_model, piece_model
from data_service.tokenizers.tokenizer import Tokenizer

_PICKLE = (
    b"\x80"  # first byte of every pickle since protocol 2, but of no UTF-8 text and no SentencePiece model
)


def load_tokenizer(uri: str) -> Tokenizer:
    """Return the tokenizer in a folder, local or s3://.

    Raises:
        TokenizerError: there is no tokenizer, or it cannot be used.
        StoreError: the store cannot be read.
    """
    store = open_store(uri)
    return from_files(read_files(store), where=store.uri)


def read_files(folder: Store) -> dict[str, bytes]:
    """Return the contents of the files in `folder` that describe a tokenizer. Raises StoreError: it cannot be read."""
    found = {name: _get(folder, name) for name in (*TOKENIZER_FILES, MODEL_CONFIG)}
    return {name: content for name, content in found.items() if content is not None}


def find_tokenizer(
    folders: Iterable[Store], load: Callable[[str], Tokenizer] = load_tokenizer
) -> Tokenizer | None:
    """Return the tokenizer in the first of the folders that holds one, as `load` reads it; None if none does. Raises as
    `load`."""
    return next((load(store.uri) for store in folders if holds_tokenizer(store)), None)


def holds_tokenizer(folder: Store) -> bool:
    """Return whether `folder` holds a tokenizer, ours or of transformers. Raises StoreError: it cannot be read."""
    return any(folder.size(name) is not None for name in DECISIVE_FILES)


def save_tokenizer(tokenizer: Tokenizer, uri: str) -> None:
    """Write a tokenizer's files into a folder. `tokenizer.json`, without which it cannot be loaded, is written last."""
    store = open_store(uri)
    files = tokenizer.save_files()
    for name in sorted(files, key=lambda name: name == DEFINITION):
        store.put(name, files[name])


def from_files(files: Mapping[str, bytes], *, where: str = "tokenizer") -> Tokenizer:
    """Return the tokenizer that is described by file contents, given by name.

    `tokenizer.json` decides if it is there; else a WordPiece `vocab.txt`, a byte-level `vocab.json` with
    `merges.txt`, or a SentencePiece model, each read as the class of its family in `transformers` reads it.

    Args:
        files: files as `Tokenizer.save_files` returns them, or of a folder in the `transformers` format.
        where: name of the folder in errors.

    Raises:
        TokenizerError: files are missing, damaged or pickled, or are not those of a tokenizer.
    """
    for name, content in files.items():
        if content.startswith(_PICKLE):
            raise TokenizerError(
                f"{where}: {name} is a pickle, which could run code when read",
                remedy="save the tokenizer with transformers' save_pretrained and give that folder",
            )
    kept = {name: files[name] for name in MODEL_FILES if name in files}
    return Tokenizer(
        definition_of(files, where), configured_roles(files, where), model_files=kept, where=where
    )


def configured_roles(files: Mapping[str, bytes], where: str) -> dict[str, object]:
    """Return what a folder's files configure: `cls_token`, `bos_token` ... Raises TokenizerError: one is damaged."""
    config = json_file(files, CONFIG, where)
    return json_file(files, SPECIAL_TOKENS, where) | {k: v for k, v in config.items() if v is not None}


def definition_of(files: Mapping[str, bytes], where: str) -> str:
    """Return the text of a `tokenizer.json`. Raises TokenizerError: there is no tokenizer."""
    if DEFINITION in files:
        return text_file(files, DEFINITION, where)
    published = read_published(files, where)
    if published is None:
        raise TokenizerError(
            f"{where}: no tokenizer here: neither {DEFINITION} nor a vocabulary",
            remedy="check the path, or train a tokenizer with `maskfleet tokenizer train`",
        )
    return published.to_str()


def _get(store: Store, name: str) -> bytes | None:
    try:
        return store.get(name)
    except KeyMissing:
        return None


SentencePieceFamily = Literal["albert", "xlnet", "deberta-v2"]
Family = Literal["bert", "roberta", "deberta"] | SentencePieceFamily

# Classes of `transformers`, and `model_type` in config.json.
_CLASSES: Mapping[str, Family] = {
    "BertTokenizer": "bert",
    "ElectraTokenizer": "bert",
    "RobertaTokenizer": "roberta",
    "DebertaTokenizer": "deberta",
    "AlbertTokenizer": "albert",
    "XLNetTokenizer": "xlnet",
    "DebertaV2Tokenizer": "deberta-v2",
}
_MODEL_TYPES: Mapping[str, Family] = {
    "bert": "bert",
    "electra": "bert",
    "roberta": "roberta",
    "deberta": "deberta",
    "albert": "albert",
    "xlnet": "xlnet",
    "deberta-v2": "deberta-v2",
}
_STYLES: Mapping[Family, SpecialStyle] = {
    "bert": STYLES["bert"],
    "roberta": STYLES["roberta"],
    "deberta": STYLES["deberta"],
    "albert": STYLES["albert"],
    "xlnet": STYLES["xlnet"],
    "deberta-v2": STYLES["deberta"],
}
_ROLES = (
    "bos",
    "eos",
    "unk",
    "sep",
    "pad",
    "cls",
    "mask",
)  # order in which missing special tokens get their ids


@dataclass(frozen=True)
class _Folder:
    """The files of a folder. `files`: contents by name; `where`: name of the folder in errors."""

    files: Mapping[str, bytes]
    where: str

    def text(self, name: str) -> str:
        return text_file(self.files, name, self.where)

    @cached_property
    def config(self) -> dict[str, Any]:
        return json_file(self.files, CONFIG, self.where)

    @cached_property
    def declared(self) -> Family | None:
        """Family of the class that the tokenizer's or the model's configuration names, else of the model's type.

        `transformers` decides in the same way.
        """
        model = json_file(self.files, MODEL_CONFIG, self.where)
        for settings in (self.config, model):
            named = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
            if named in _CLASSES:
                return _CLASSES[named]
        return _MODEL_TYPES.get(str(model.get("model_type")))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of the configuration, with special tokens under the names of their roles."""
        named = {key: value for key, value in self.config.items() if value is not None}
        return json_file(self.files, SPECIAL_TOKENS, self.where) | named


def read_published(files: Mapping[str, bytes], where: str) -> tokenizers.Tokenizer | None:
    """Return the tokenizer of a folder without `tokenizer.json`; None if it holds no vocabulary either.

    A SentencePiece model of no known family is read as SentencePiece itself reads it.

    Raises:
        TokenizerError: files are damaged, or were not saved together.
    """
    folder = _Folder(files, where)
    if "vocab.txt" in files:
        return _with_special_tokens(_wordpiece(folder), folder, "bert")
    if "vocab.json" in files and "merges.txt" in files:
        codec = _byte_bpe(folder)
        brackets = codec.token_to_id("[CLS]") is not None
        return _with_special_tokens(codec, folder, "deberta" if brackets else "roberta")
    name = next((name for name in MODEL_FILES if name in files), None)
    if name is None:
        return None
    proto = parse_model(files[name], f"{where}: {name}")
    family = folder.declared or ("deberta-v2" if name == "spm.model" else None)
    match family:
        case "albert" | "xlnet" | "deberta-v2":
            codec = _sentencepiece(proto, family, folder.config)
            return _with_special_tokens(codec, folder, family, marked_pieces(proto))
        case _:
            return convert_model(proto, mask=None)


def _wordpiece(folder: _Folder) -> tokenizers.Tokenizer:
    """Return a WordPiece tokenizer. Unset options have the defaults of transformers: uncased."""
    # The library's own reader drops white space at the end of a line, a carriage return too.
    lines = folder.text("vocab.txt").removesuffix("\n").split("\n")
    ids = {line.rstrip(): i for i, line in enumerate(lines)}
    unknown = token_name(folder.config.get("unk_token")) or "[UNK]"
    if unknown not in ids:
        raise TokenizerError(
            f"{folder.where}: vocab.txt has no {unknown}",
            remedy="give the vocab.txt of a BERT model, one piece a line",
        )
    codec = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown))
    codec.normalizer = normalizers.BertNormalizer(
        lowercase=bool(folder.config.get("do_lower_case", True)),
        strip_accents=folder.config.get("strip_accents"),
        handle_chinese_chars=bool(folder.config.get("tokenize_chinese_chars", True)),
    )
    codec.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    codec.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return codec


def _byte_bpe(folder: _Folder) -> tokenizers.Tokenizer:
    vocabulary = json_file(folder.files, "vocab.json", folder.where)
    lines = (line.rstrip() for line in folder.text("merges.txt").split("\n"))
    merges = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    pairs = [(left, right) for left, _, right in merges]
    missing = next((pair for pair in pairs if not {*pair, "".join(pair)} <= vocabulary.keys()), None)
    if missing is not None:
        raise TokenizerError(
            f"{folder.where}: merges.txt joins {missing[0]!r} and {missing[1]!r}, which vocab.json does not hold",
            remedy="give the vocab.json and merges.txt that were saved together",
        )
    codec = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    prefixed = bool(folder.config.get("add_prefix_space", False))
    codec.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefixed)
    codec.decoder = decoders.ByteLevel()
    return codec


def _sentencepiece(
    proto: ModelProto, family: SentencePieceFamily, config: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    codec = tokenizers.Tokenizer(piece_model(proto, byte_fallback=False))
    before: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.WhitespaceSplit()]
    scheme = "always" if family == "xlnet" or config.get("add_prefix_space", True) else "never"
    match family:
        case "albert":
            codec.normalizer = _decomposing(
                proto,
                lower=bool(config.get("do_lower_case", True)),
                strip_accents=not config.get("keep_accents", False),
            )
        case "xlnet":  # its class strips accents whatever `keep_accents` says
            codec.normalizer = _decomposing(
                proto, lower=bool(config.get("do_lower_case", False)), strip_accents=True
            )
        case "deberta-v2":
            codec.normalizer = _composing(lower=bool(config.get("do_lower_case", False)))
            isolated = bool(config.get("split_by_punct", False))
            before = [pre_tokenizers.Punctuation(behavior="isolated")] if isolated else []
            scheme = "always" if config.get("add_prefix_space", True) else "first"
        case _:
            assert_never(family)
    marks = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    codec.pre_tokenizer = pre_tokenizers.Sequence([*before, marks])
    codec.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    return codec


def _decomposing(proto: ModelProto, *, lower: bool, strip_accents: bool) -> normalizers.Normalizer:
    """Return the normalizer of ALBERT and XLNet, which turns TeX's quotes into plain ones."""
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if strip_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if lower:
        steps.append(normalizers.Lowercase())
    if table := proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(table))
    return normalizers.Sequence(steps)


def _composing(*, lower: bool) -> normalizers.Normalizer:
    """Return the normalizer of DeBERTa, which turns a run of white space into one space and removes it at the end."""
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lower else []
    spaces = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
    return normalizers.Sequence(
        [*steps, spaces, normalizers.NFC(), normalizers.Strip(left=False, right=True)]
    )


def _with_special_tokens(
    codec: tokenizers.Tokenizer, folder: _Folder, family: Family, marked: list[AddedToken] | None = None
) -> tokenizers.Tokenizer:
    """Add a folder's added tokens, special tokens and row layout to `codec`; return it.

    If the folder declares a family, a special token that the vocabulary lacks gets the next id, as in `transformers`.

    Args:
        codec: tokenizer with the vocabulary.
        folder: folder with the configuration.
        family: family if the folder declares none.
        marked: pieces that a SentencePiece model never splits; a configuration may name others instead.
    """
    style = _STYLES[folder.declared or family]
    names: dict[str, str | None] = dict(style.names.by_role())
    names |= {role: found for role in _ROLES if (found := token_name(folder.settings.get(f"{role}_token")))}
    special = [name for role in _ROLES if (name := names.get(role))]
    _add_numbered(codec, folder, special)
    if folder.declared is None and family != "deberta-v2":
        special = [name for name in special if codec.token_to_id(name) is not None]
    codec.add_special_tokens([_special(name, lstrip=name == names["mask"]) for name in special])
    extra = folder.settings.get("extra_special_tokens") or folder.settings.get("additional_special_tokens")
    if isinstance(extra, list):
        codec.add_special_tokens([_special(name) for entry in extra if (name := token_name(entry))])
    else:
        codec.add_tokens(marked or [])
    ends = [
        (name, i) for role in ("cls", "sep") if (i := codec.token_to_id(name := str(names[role]))) is not None
    ]
    if len(ends) == 2:
        codec.post_processor = row_template(style.layout, *ends)
    return codec


def _add_numbered(codec: tokenizers.Tokenizer, folder: _Folder, special: list[str]) -> None:
    """Add the tokens that follow the vocabulary, with the ids that the folder gives them."""
    for wanted, token in sorted(_numbered(folder, special), key=lambda entry: entry[0]):
        codec.add_tokens([token])
        if codec.token_to_id(token.content) != wanted:
            raise TokenizerError(
                f"{folder.where}: {token.content!r} should have id {wanted}, but would get "
                f"{codec.token_to_id(token.content)}",
                remedy="give the vocabulary and the added tokens that were saved together",
            )


def _numbered(folder: _Folder, special: list[str]) -> list[tuple[int, AddedToken]]:
    """Return (id, token) of the added tokens.

    They are in `added_tokens_decoder` of the configuration, or in the older file of added tokens.
    """
    described = folder.config.get("added_tokens_decoder")
    if isinstance(described, Mapping):
        return [(int(i), _described(token)) for i, token in described.items() if token_name(token)]
    numbered = json_file(folder.files, ADDED_TOKENS, folder.where)
    return [
        (int(i), AddedToken(name, special=name in special, normalized=name not in special))
        for name, i in numbered.items()
    ]


def _described(token: Mapping[str, Any]) -> AddedToken:
    flags = {
        key: bool(token.get(key, False))
        for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
    }
    return AddedToken(str(token["content"]), **flags)


def _special(name: str, *, lstrip: bool = False) -> AddedToken:
    return AddedToken(name, special=True, normalized=False, lstrip=lstrip)
