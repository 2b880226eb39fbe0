"""The files of a tokenizer, as `transformers.AutoTokenizer` and older tools read them; and limits on a
`tokenizer.json`.

A malicious `tokenizer.json` could exhaust memory, run without end, or crash the library that reads it. Published ones
are far below the limits.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from data_service.errors import TokenizerError
from data_service.formats import parse_json
from data_service.tokenizers.specials import SpecialNames

DEFINITION_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MODEL_CONFIG = "config.json"
SENTENCEPIECE_FILES = (
    "spiece.model",
    "spm.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
)
"""File names that model families use for their SentencePiece model."""
TRAINING_REPORT = "training_report.json"
"""Name of the file that says how many words a vocabulary was trained on."""
TOKENIZER_FILES = (
    TRAINING_REPORT,
    *(DEFINITION_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS),
    *("vocab.txt", "vocab.json", "merges.txt"),
    *SENTENCEPIECE_FILES,
)
"""Names of all tokenizer files that Maskfleet and `transformers` write."""
VOCABULARY_FILES = (DEFINITION_FILE, "vocab.txt", "vocab.json", *SENTENCEPIECE_FILES)
"""File names; a folder holds a tokenizer if it has one of these files."""

Definition = dict[str, Any]  # a parsed tokenizer.json
TokenizerRules = Literal["file", "class", "agreeing"]
"""What to follow if `tokenizer.json` and the class that its folder names differ: see `load.from_files`."""

# The value that means "no limit" in `transformers`: the model's configuration has the model's maximum.
_UNLIMITED_MODEL_MAX_LENGTH = 10**30


def companion_files(definition: Definition, pieces: Sequence[str], names: SpecialNames) -> dict[str, bytes]:
    """Return the contents, by name, of the files to write next to `tokenizer.json` for `transformers` and other tools.

    `tokenizer.json` alone defines the tokenizer; vocabulary files repeat its vocabulary.
    """
    special_map = {"bos_token": names.cls, "eos_token": names.sep, **names.by_token_key()}
    # The class of a model family rebuilds the tokenizer from the vocabulary and its own constants;
    # PreTrainedTokenizerFast reads tokenizer.json as it is.
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _UNLIMITED_MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "model_input_names": _model_input_names(definition),
        **special_map,
    }
    normalizer = definition.get("normalizer") or {}
    if normalizer.get("type") == "BertNormalizer":  # settings for classes that rebuild the tokenizer
        config |= {"do_lower_case": normalizer["lowercase"], "strip_accents": normalizer.get("strip_accents")}
        config |= {"tokenize_chinese_chars": normalizer["handle_chinese_chars"]}
    return {
        CONFIG_FILE: _json_bytes(config),
        SPECIAL_TOKENS_FILE: _json_bytes(special_map),
        **_vocabulary_files(definition, pieces),
    }


def _model_input_names(definition: Definition) -> list[str]:
    # Models that use RoBERTa's layout have a single token type, so they must not be given token_type_ids.
    has_types = '"type_id": 1' in json.dumps(definition.get("post_processor"))
    return ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]


def _vocabulary_files(definition: Definition, pieces: Sequence[str]) -> dict[str, bytes]:
    model = definition["model"]
    if model.get("type") == "WordPiece":
        return {"vocab.txt": "".join(f"{piece}\n" for piece in pieces).encode()}
    if model.get("ignore_merges"):
        return {}  # vocabulary files cannot express `ignore_merges`
    if model.get("type") == "BPE" and '"ByteLevel"' in json.dumps(definition.get("pre_tokenizer")):
        merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
        return {
            "vocab.json": json.dumps(model["vocab"], ensure_ascii=False).encode(),
            "merges.txt": "".join(["#version: 0.2\n", *(f"{merge}\n" for merge in merges)]).encode(),
        }
    return {}


def _json_bytes(content: Definition) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()


def text_file(files: Mapping[str, bytes], name: str, where: str) -> str:
    """Return the text of file `name` of `files`. Raises TokenizerError: it is not UTF-8."""
    try:
        return files[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{where}: {name} is not UTF-8 text (byte {error.start})", remedy="save the tokenizer again"
        ) from error


def json_file(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    """Return the JSON object in file `name` of `files`, empty if the file is absent. Raises TokenizerError: it is not a
    JSON object."""
    if name not in files:
        return {}
    try:
        content = parse_json(text_file(files, name, where))
    except ValueError as error:
        raise TokenizerError(f"{where}: {name} is not JSON: {error}", remedy="save the tokenizer again") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{where}: {name} is not a JSON object", remedy="save the tokenizer again")
    return content


def vocabulary_file(files: Mapping[str, bytes], name: str, where: str) -> dict[str, int]:
    """Return the id of each piece in file `name` of `files`. Raises TokenizerError: not a JSON object of valid ids."""
    ids = json_file(files, name, where)
    return {piece: _check_id(number, f"{where}: {name}: the id of {piece!r}") for piece, number in ids.items()}


def described_tokens(described: Mapping[str, object], where: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (id, token) of the setting `added_tokens_decoder`. Raises TokenizerError: an id or a token is invalid."""
    place = f"{where}: {CONFIG_FILE}: added_tokens_decoder"
    for key, token in described.items():
        number = _check_id(int(key) if key.isdecimal() and len(key) < _MAX_ID_DIGITS else key, f"{place}: the id")
        if not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
            raise _odd_value_error(f"{place}: token {number}", token, "an object with content")
        yield number, token


def check_flag(settings: Mapping[str, object], name: str, where: str) -> None:
    """Raise TokenizerError if a setting is neither true, false nor null."""
    if not isinstance(value := settings.get(name), bool | None):
        raise _odd_value_error(f"{where}: {CONFIG_FILE}: {name}", value, "true, false or null")


def _check_id(number: object, place: str) -> int:
    """Return `number`. Raises TokenizerError: it is not a valid id. A huge id would crash the library."""
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < MAX_IDS:
        raise _odd_value_error(place, number, f"an integer from 0 to {MAX_IDS - 1:,}")
    return number


def _odd_value_error(place: str, value: object, needed: str) -> TokenizerError:
    return TokenizerError(f"{place} is {repr(value)[:40]}, not {needed}", remedy="save the tokenizer again")


_RULE_LISTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""The sections of a tokenizer.json that hold a rule, and the key under which a `Sequence` rule lists its rules."""
MAX_IDS = 1 << 22  # largest vocabulary size, to bound arrays; published vocabularies have up to 300,000 ids
_MAX_ID_DIGITS = 10  # a number with so many digits or more is not parsed as an id
MAX_WORD_CHARACTERS = 1000  # longest word of WordPiece, which takes cubic time; BERT's limit is 100
MAX_GROWTH_FACTOR = 4096  # largest factor by which all rules together may lengthen a text
_UNCHANGED_ERRORS = (KeyboardInterrupt, SystemExit, TokenizerError)  # `library_errors` lets them pass


def parse_definition(definition: str, where: str) -> dict[str, Any]:
    """Return the parsed `tokenizer.json`. Raises TokenizerError: it is malformed, or exceeds a limit."""
    try:
        parsed = parse_json(definition)
    except ValueError as error:
        raise unreadable_error(where, str(error)) from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise unreadable_error(where, "it has no model section")
    for problem in (*_find_non_object_rules(parsed), *_exceeded_limits(parsed)):
        raise unreadable_error(where, problem)
    return parsed


def check_definition_file(folder: Path) -> None:
    """Check the `tokenizer.json` of a folder, if it has one, before another library reads it.

    Raises as `parse_definition`.
    """
    path = folder / DEFINITION_FILE
    if path.is_file():
        parse_definition(path.read_text("utf-8", "replace"), str(path))


@contextmanager
def library_errors(where: str, what: str = "not a tokenizer definition") -> Iterator[None]:
    """Convert every error of the library `tokenizers` within the `with` block into a TokenizerError.

    The library raises plain `Exception`; its panics derive from `BaseException` only.
    """
    try:
        yield
    except _UNCHANGED_ERRORS:
        raise
    except BaseException as error:
        raise unreadable_error(where, str(error).strip(), what) from error


def unreadable_error(where: str, reason: str, what: str = "not a tokenizer definition") -> TokenizerError:
    return TokenizerError(
        f"{where}: {what}: {reason}",
        remedy="give the folder of a tokenizer saved by `maskfleet tokenizer train` or by transformers",
    )


def _find_non_object_rules(parsed: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each rule of a tokenizer.json that is not a JSON object.

    The library (tokenizers 0.23) also accepts some lists, such as ["Lowercase"]; Maskfleet's code does not.
    """
    for part, list_name in _RULE_LISTS.items():
        rules = [parsed.get(part)]
        for rule in rules:
            if isinstance(rule, dict):
                inner = rule.get(list_name)
                rules += inner if isinstance(inner, list) else []
            elif rule is not None:
                yield f"its {part} is or holds {json.dumps(rule)[:40]}, which is not a JSON object"


def _exceeded_limits(parsed: dict[str, Any]) -> Iterator[str]:
    model = parsed["model"]
    highest = max((number for number in _definition_ids(parsed) if isinstance(number, int)), default=0)
    if highest >= MAX_IDS:
        yield f"a piece has the id {highest:,}, but at most {MAX_IDS:,} ids are allowed"
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > MAX_WORD_CHARACTERS:
        yield f"max_input_chars_per_word is {longest:,}, but at most {MAX_WORD_CHARACTERS:,} is allowed"
    growth = 1
    for content in _inserted_texts((parsed.get("normalizer"), parsed.get("pre_tokenizer"))):
        growth = min(growth * max(1, len(content)), 1 << 40)
    if growth > MAX_GROWTH_FACTOR:
        yield f"the rules can make a text {growth:,} times as long, but at most {MAX_GROWTH_FACTOR:,} times is allowed"


def _definition_ids(parsed: dict[str, Any]) -> Iterator[object]:
    vocabulary = parsed["model"].get("vocab")
    if isinstance(vocabulary, dict):
        yield from vocabulary.values()
    for token in parsed.get("added_tokens") or () if isinstance(parsed.get("added_tokens"), list) else ():
        yield token.get("id") if isinstance(token, dict) else None


def _inserted_texts(rule: object) -> Iterator[str]:
    """Yield the strings that a rule, or a rule nested in it, can insert into a text."""
    if isinstance(rule, list | tuple):
        for one in rule:
            yield from _inserted_texts(one)
    elif isinstance(rule, dict):
        for name in ("content", "prepend", "replacement"):
            if isinstance(found := rule.get(name), str):
                yield found
        for one in rule.values():
            yield from _inserted_texts(one)
