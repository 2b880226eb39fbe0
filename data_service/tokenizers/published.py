"""Builds a tokenizer from a folder of the `transformers` format by the rules of the tokenizer class named there
(`data_service.tokenizers.class_rules`).

Older folders have only a vocabulary; how text is normalised and split into words is in the code of their class. In
`transformers` 5 the rules of many classes even override those of a `tokenizer.json` (`definition_by_class`).
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_args

import tokenizers
from tokenizers import AddedToken, models

from data_service.errors import TokenizerError
from data_service.tokenizers.class_rules import (
    CLASSES_FOLLOWING_FILE,
    CLASSES_WITHOUT_RULES,
    FAMILY_BY_CLASS,
    FAMILY_BY_TYPE,
    FURTHER_PIECES,
    LAYOUTS,
    MBART_LANGUAGES,
    MODEL_TYPES_FOLLOWING_FILE,
    MORE_SPECIAL_TOKENS_BY_ROLE,
    T5_SENTINELS,
    FairseqFamily,
    Family,
    special_names,
    text_rules,
)
from data_service.tokenizers.files import (
    ADDED_TOKENS,
    CONFIG_FILE,
    DEFINITION_FILE,
    MODEL_CONFIG,
    SENTENCEPIECE_FILES,
    SPECIAL_TOKENS_FILE,
    Definition,
    check_flag,
    described_tokens,
    json_file,
    library_errors,
    parse_definition,
    text_file,
    vocabulary_file,
)
from data_service.tokenizers.specials import added_token, row_template, token_name
from data_service.tokenizers.spm import convert_model, parse_model, piece_model, pieces_matched_first

if TYPE_CHECKING:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

# The order in which special tokens that the vocabulary lacks get ids, by role.
_ROLE_ORDER = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "question")
_FAIRSEQ_FAMILIES: tuple[Family, ...] = get_args(FairseqFamily)
# Ids of the unknown token that the classes use, whatever the vocabulary says.
_UNKNOWN_IDS: Mapping[Family, int] = {
    "albert": 1,
    "rembert": 2,
    "t5": 2,
    **dict.fromkeys(_FAIRSEQ_FAMILIES, 3),
}


@dataclass(frozen=True)
class _TokenizerFolder:
    """The tokenizer files of a folder. `files`: contents by name; `where`: name of the folder in errors."""

    files: Mapping[str, bytes]
    where: str

    def text(self, name: str) -> str:
        return text_file(self.files, name, self.where)

    @cached_property
    def config(self) -> dict[str, Any]:
        return json_file(self.files, CONFIG_FILE, self.where)

    @cached_property
    def model_config(self) -> dict[str, Any]:
        return json_file(self.files, MODEL_CONFIG, self.where)

    @property
    def model_type(self) -> object:
        return self.model_config.get("model_type")

    @cached_property
    def declared_class(self) -> str:
        """The tokenizer class named in the tokenizer's or else the model's configuration; else the model type; else "".

        `transformers` chooses in the same order.
        """
        names = (settings.get("tokenizer_class") for settings in (self.config, self.model_config))
        return str(next(filter(None, names), self.model_type) or "")

    @property
    def plain_class(self) -> str:
        """The name of the declared class without `Fast` at the end."""
        return self.declared_class.removesuffix("Fast")

    @cached_property
    def declared_family(self) -> Family | None:
        """The family of the declared class or model type; None if none is declared, or its rules are unknown."""
        if self.plain_class.endswith("Tokenizer"):
            return FAMILY_BY_CLASS.get(self.plain_class.removesuffix("Tokenizer"))
        return FAMILY_BY_TYPE.get(self.declared_class)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of tokenizer_config.json, and special tokens that only special_tokens_map.json names."""
        named = {key: value for key, value in self.config.items() if value is not None}
        return json_file(self.files, SPECIAL_TOKENS_FILE, self.where) | named

    def refuse_unknown_class(self) -> None:
        """Raise TokenizerError if the rules of the declared class or model type are unknown."""
        if not self.declared_class or self.declared_family or self.plain_class in CLASSES_WITHOUT_RULES:
            return
        raise TokenizerError(
            f"{self.where}: there is no {DEFINITION_FILE}, and the rules of {self.declared_class} are not known",
            remedy=f"if the class can, let transformers write {DEFINITION_FILE}: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)",
        )


def read_published(files: Mapping[str, bytes], where: str) -> tokenizers.Tokenizer | None:
    """Return the tokenizer of a folder without `tokenizer.json`; None if it holds no vocabulary either.

    If no class is named, a SentencePiece model is read by the rules of SentencePiece.

    Raises:
        TokenizerError: files are damaged or were not saved together, or the rules of the named class are unknown.
    """
    folder = _TokenizerFolder(files, where)
    if "vocab.txt" in files:
        folder.refuse_unknown_class()
        family = folder.declared_family or "bert"
        model = _wordpiece_model(folder, family)
        return _with_special_tokens(_make_codec(model, folder, family), folder, family)
    if "vocab.json" in files and "merges.txt" in files:
        folder.refuse_unknown_class()
        model, brackets = _byte_bpe_model(folder)
        family = folder.declared_family or ("deberta" if brackets else "roberta")
        return _with_special_tokens(_make_codec(model, folder, family), folder, family)
    name = next((name for name in SENTENCEPIECE_FILES if name in files), None)
    if name is None:
        return None
    folder.refuse_unknown_class()
    proto = parse_model(files[name], f"{where}: {name}")
    found = folder.declared_family or ("deberta-v2" if name == "spm.model" else None)
    if found is None:
        return convert_model(proto, mask=None)
    model, characters = _sentencepiece_model(proto, folder, found), proto.normalizer_spec.precompiled_charsmap
    codec = _make_codec(model, folder, found, characters)
    return _with_special_tokens(codec, folder, found, [] if found in _FAIRSEQ_FAMILIES else pieces_matched_first(proto))


def default_special_tokens(files: Mapping[str, bytes], where: str) -> dict[str, object]:
    """Return the default special tokens of the class that a folder names, under keys such as `cls_token`; empty if the
    folder has a `tokenizer.json`. Raises TokenizerError: a file is damaged."""
    family = None if DEFINITION_FILE in files else _TokenizerFolder(files, where).declared_family
    named = {} if family is None else special_names(family).by_token_key()
    return {key: name for key, name in named.items() if name}


def definition_by_class(
    files: Mapping[str, bytes], where: str, *, only_if_known: bool = False
) -> tuple[str, str] | None:
    """Return (class, definition) for a folder with a `tokenizer.json`: the `tokenizer.json` that the named class of
    `transformers` 5 would build from its vocabulary; None if the class follows the file, or its rules are unknown.

    Raises:
        TokenizerError: a file is damaged; the vocabulary is not of the class's kind; or with `only_if_known`, the rules
            of the class are unknown.
    """
    folder = _TokenizerFolder(files, where)
    family, text = folder.declared_family, folder.text(DEFINITION_FILE)
    definition = parse_definition(text, where)
    if only_if_known and family is None and folder.plain_class not in CLASSES_WITHOUT_RULES:
        unknown = f"the rules of {folder.declared_class} are not known"
        raise TokenizerError(
            f"{where}: {unknown if folder.declared_class else 'the folder names no tokenizer class'}",
            remedy=f"use the rules in {DEFINITION_FILE} (--tokenizer-rules file)",
        )
    follows = folder.plain_class in CLASSES_FOLLOWING_FILE or folder.model_type in MODEL_TYPES_FOLLOWING_FILE
    # Folders of Llama 3 name Llama 2's class, but their file is followed; ESM's class never writes a tokenizer.json.
    if family is None or follows or family == "esm" or (family == "llama" and '"ByteLevel"' in text):
        return None
    with library_errors(where):
        model = _class_model(family, definition["model"], _unknown_piece(folder, family))
        if model is None:
            raise TokenizerError(
                f"{where}: {folder.declared_class} cannot use a vocabulary of the kind "
                f"{definition['model'].get('type')}, which {DEFINITION_FILE} holds",
                remedy=f"use {DEFINITION_FILE} (--tokenizer-rules file), or correct tokenizer_class in {CONFIG_FILE}",
            )
        made = json.loads(_make_codec(model, folder, family, _character_map(definition)).to_str())
    changed = {part: made[part] for part in ("model", "normalizer", "pre_tokenizer", "decoder")}
    return folder.declared_class, json.dumps(definition | changed)


def _class_model(family: Family, model: Definition, unknown: str) -> models.Model | None:
    """Return a family's model of the vocabulary in `model`, a section of tokenizer.json; None if the kind is wrong."""
    vocabulary, merges = model.get("vocab"), model.get("merges")
    match family:
        case "bert" | "splinter" | "mpnet" | "funnel":
            if isinstance(vocabulary, list):
                vocabulary = {entry[0]: i for i, entry in enumerate(vocabulary)}
            return models.WordPiece(vocabulary or {}, unk_token=unknown)
        case "roberta" | "deberta" | "gpt2" | "llama" | "gemma":
            if not isinstance(vocabulary, dict) or not isinstance(merges, list):
                return None
            split = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
            pairs = [(left, right) for left, right in split]
            if family not in ("llama", "gemma"):
                return models.BPE(vocabulary, pairs)
            named = unknown if family == "gemma" else None
            return models.BPE(vocabulary, pairs, unk_token=named, fuse_unk=True, byte_fallback=True)
        case _:
            if not isinstance(vocabulary, list):
                return None
            scored = [(piece, float(score)) for piece, score in vocabulary]
            return _unigram_model(family, scored, unknown, int(family == "deberta-v2"))


def _unigram_model(family: Family, scored: list[tuple[str, float]], unknown: str, unknown_id: int) -> models.Unigram:
    """Return the unigram model of scored pieces. `unknown_id`: id of the unknown token, unless the class decides it."""
    if family in ("big_bird", "deberta-v2"):
        other = 100 if family == "big_bird" else unknown_id
        unknown_id = scored.index((unknown, 0.0)) if (unknown, 0.0) in scored else other
    return models.Unigram(scored, unk_id=_UNKNOWN_IDS.get(family, unknown_id), byte_fallback=False)


def _unknown_piece(folder: _TokenizerFolder, family: Family) -> str:
    return token_name(folder.config.get("unk_token")) or special_names(family).unk


def _character_map(definition: Definition) -> bytes:
    """Return the SentencePiece character map in a tokenizer.json; empty if it has none."""
    normalizer = definition.get("normalizer") or {}
    for rule in (normalizer, *normalizer.get("normalizers", ())):
        if rule.get("type") == "Precompiled":
            return base64.b64decode(rule["precompiled_charsmap"])
    return b""


def _make_codec(
    model: models.Model, folder: _TokenizerFolder, family: Family, characters: bytes = b""
) -> tokenizers.Tokenizer:
    """Return a tokenizer of this model and a family's rules. `characters`: SentencePiece character map, or empty."""
    check_flag(folder.settings, "strip_accents", folder.where)
    codec, rules = tokenizers.Tokenizer(model), text_rules(family, folder.settings, characters)
    if rules.normalizer is not None:
        codec.normalizer = rules.normalizer
    if rules.pre_tokenizer is not None:
        codec.pre_tokenizer = rules.pre_tokenizer
    codec.decoder = rules.decoder
    return codec


def _wordpiece_model(folder: _TokenizerFolder, family: Family) -> models.Model:
    # White space at the end of a line is dropped, as in the library's own reader.
    lines = folder.text("vocab.txt").removesuffix("\n").split("\n")
    ids = {line.rstrip(): i for i, line in enumerate(lines)}
    unknown = _unknown_piece(folder, family)
    if unknown not in ids:
        raise TokenizerError(
            f"{folder.where}: vocab.txt lacks the unknown token {unknown}",
            remedy="give a vocab.txt in BERT's format, one piece per line",
        )
    if family == "esm":
        return models.WordLevel(ids, unk_token=unknown)
    return models.WordPiece(ids, unk_token=unknown)


def _byte_bpe_model(folder: _TokenizerFolder) -> tuple[models.Model, bool]:
    """Return the byte-level BPE model, and whether its special tokens look like [CLS] rather than <s>."""
    vocabulary = vocabulary_file(folder.files, "vocab.json", folder.where)
    lines = (line.rstrip() for line in folder.text("merges.txt").split("\n"))
    merges = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    pairs = [(left, right) for left, _, right in merges]
    missing = next((pair for pair in pairs if not {*pair, "".join(pair)} <= vocabulary.keys()), None)
    if missing is not None:
        raise TokenizerError(
            f"{folder.where}: merges.txt joins {missing[0]!r} and {missing[1]!r}, which vocab.json does not hold",
            remedy="give a vocab.json and a merges.txt that were saved together",
        )
    return models.BPE(vocabulary, pairs), "[CLS]" in vocabulary


def _sentencepiece_model(proto: "ModelProto", folder: _TokenizerFolder, family: Family) -> models.Model:
    """Return a family's model of SentencePiece pieces, with fairseq's special tokens first if the family has them."""
    if family == "llama":
        return piece_model(proto, byte_fallback=True)
    if proto.trainer_spec.model_type != 1:
        raise TokenizerError(
            f"{folder.where}: {folder.declared_class or family} needs a unigram model, but the SentencePiece model "
            "is BPE",
            remedy=f"correct tokenizer_class in {CONFIG_FILE}, or delete it to use the rules of the SentencePiece "
            "model",
        )
    scored = [(piece.piece, float(piece.score)) for piece in proto.pieces]
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    match family:
        case "xlm-roberta":
            scored = [*special, *scored[3:], ("<mask>", 0.0)]
        case "camembert":
            unused = [("<s>NOTUSED", 0.0), special[1], ("</s>NOTUSED", 0.0), special[3], ("<unk>NOTUSED", -100.0)]
            scored = [*unused, *scored[1:], ("<mask>", 0.0)]
        case "mbart":
            scored = [*special, *scored[3:], *((code, 0.0) for code in (*MBART_LANGUAGES, "<mask>"))]
        case "t5":
            scored += [(sentinel, 0.0) for sentinel in T5_SENTINELS]
        case _:
            pass
    return _unigram_model(family, scored, _unknown_piece(folder, family), proto.trainer_spec.unk_id)


def _with_special_tokens(
    codec: tokenizers.Tokenizer,
    folder: _TokenizerFolder,
    family: Family,
    unsplit_pieces: list[AddedToken] | None = None,
) -> tokenizers.Tokenizer:
    """Add a folder's added tokens, special tokens and template of special tokens to `codec`; return `codec`.

    If the folder declares a family, a special token that the vocabulary lacks gets the next id, as in `transformers`.
    `unsplit_pieces`: tokens that a SentencePiece model never splits. Tokens named in the configuration replace them.
    """
    names: dict[str, str | None] = {**special_names(family).by_role(), **MORE_SPECIAL_TOKENS_BY_ROLE.get(family, {})}
    names |= {role: found for role in _ROLE_ORDER if (found := token_name(folder.settings.get(f"{role}_token")))}
    special = [name for role in _ROLE_ORDER if (name := names.get(role))] + [*FURTHER_PIECES.get(family, ())]
    _add_tokens_with_ids(codec, folder, special)
    if folder.declared_family is None and family != "deberta-v2":
        special = [name for name in special if codec.token_to_id(name) is not None]
    codec.add_special_tokens([added_token(name, lstrip=name == names["mask"]) for name in special])
    if family == "esm":  # ESM's class matches pieces before it splits text into words
        codec.add_tokens([added_token(piece, special=False) for piece in codec.get_vocab() if piece not in special])
    extra = folder.settings.get("extra_special_tokens") or folder.settings.get("additional_special_tokens")
    if isinstance(extra, list):
        codec.add_special_tokens([added_token(name) for entry in extra if (name := token_name(entry))])
    else:
        codec.add_tokens(unsplit_pieces or [])
    ends = [(name, i) for role in ("cls", "sep") if (i := codec.token_to_id(name := str(names[role]))) is not None]
    if len(ends) == 2:
        codec.post_processor = row_template(LAYOUTS.get(family, "roberta"), *ends)
    return codec


def _add_tokens_with_ids(codec: tokenizers.Tokenizer, folder: _TokenizerFolder, special: list[str]) -> None:
    """Add a folder's added tokens to `codec`. Raises TokenizerError: one would get another id than the folder says."""
    for wanted, token in sorted(_tokens_with_ids(folder, special), key=lambda entry: entry[0]):
        codec.add_tokens([token])
        if codec.token_to_id(token.content) != wanted:
            raise TokenizerError(
                f"{folder.where}: {token.content!r} should have id {wanted}, but would get "
                f"{codec.token_to_id(token.content)}",
                remedy="give a vocabulary and added tokens that were saved together",
            )


def _tokens_with_ids(folder: _TokenizerFolder, special: list[str]) -> list[tuple[int, AddedToken]]:
    """Return (id, token) of the added tokens.

    They are in `added_tokens_decoder` of tokenizer_config.json, or in the older file added_tokens.json.
    """
    described = folder.config.get("added_tokens_decoder")
    if isinstance(described, Mapping):
        found = described_tokens(described, folder.where)
        return [(i, _token_from_json(token)) for i, token in found if token["content"]]
    numbered = vocabulary_file(folder.files, ADDED_TOKENS, folder.where)
    return [
        (i, AddedToken(name, special=name in special, normalized=name not in special)) for name, i in numbered.items()
    ]


def _token_from_json(token: Mapping[str, Any]) -> AddedToken:
    flags = {key: bool(token.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(str(token["content"]), **flags)
