"""What a `tokenizer.json` may ask for. One from elsewhere can be made to fill the memory, to compute for ever, or to
break the library that reads it; published ones are far below these bounds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_service.errors import TokenizerError
from data_service.formats import foreign_json
from data_service.tokenizers.files import DEFINITION

MOST_IDS = 1 << 22  # published vocabularies have up to 300,000; arrays over all ids are made
MOST_CHARACTERS = 1000  # of a word in WordPiece, whose time grows with their cube; BERT's: 100
MOST_GROWTH = 4096  # by which rules may lengthen a text, one after the other
_READ_ONLY = (KeyboardInterrupt, SystemExit, TokenizerError)


def parse_definition(definition: str, where: str) -> dict[str, Any]:
    """The JSON of a `tokenizer.json`. Raises TokenizerError: it is none, or beyond a bound."""
    try:
        parsed = foreign_json(definition)
    except ValueError as error:
        raise unreadable(where, str(error)) from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise unreadable(where, "it has no model section")
    for problem in _beyond(parsed):
        raise unreadable(where, problem)
    return parsed


def check_folder(folder: Path) -> None:
    """Before another library reads the folder's `tokenizer.json`, if it has one. Raises as `parse_definition`."""
    path = folder / DEFINITION
    if path.is_file():
        parse_definition(path.read_text("utf-8", "replace"), str(path))


@contextmanager
def library_errors(where: str, what: str = "not a tokenizer definition") -> Iterator[None]:
    """What the library `tokenizers` raises meanwhile becomes a TokenizerError. It raises bare exceptions, and its
    panics are no `Exception` at all."""
    try:
        yield
    except _READ_ONLY:
        raise
    except BaseException as error:
        raise unreadable(where, str(error).strip(), what) from error


def unreadable(where: str, reason: str, what: str = "not a tokenizer definition") -> TokenizerError:
    return TokenizerError(
        f"{where}: {what}: {reason}",
        remedy="give the folder of a tokenizer saved by `maskfleet tokenizer train` or by transformers",
    )


def _beyond(parsed: dict[str, Any]) -> Iterator[str]:
    model = parsed["model"]
    highest = max((number for number in _ids(parsed) if isinstance(number, int)), default=0)
    if highest >= MOST_IDS:
        yield f"a piece has the id {highest:,}, and there may be {MOST_IDS:,}"
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > MOST_CHARACTERS:
        yield f"max_input_chars_per_word is {longest:,}, and may be {MOST_CHARACTERS:,}"
    growth = 1
    for content in _inserted((parsed.get("normalizer"), parsed.get("pre_tokenizer"))):
        growth = min(growth * max(1, len(content)), 1 << 40)
    if growth > MOST_GROWTH:
        yield f"its rules may make a text {growth:,} times as long, and may {MOST_GROWTH:,} times"


def _ids(parsed: dict[str, Any]) -> Iterator[object]:
    vocabulary = parsed["model"].get("vocab")
    if isinstance(vocabulary, dict):
        yield from vocabulary.values()
    for token in parsed.get("added_tokens") or () if isinstance(parsed.get("added_tokens"), list) else ():
        yield token.get("id") if isinstance(token, dict) else None


def _inserted(rule: object) -> Iterator[str]:
    """Texts that rules put in place of others, or before them."""
    if isinstance(rule, list | tuple):
        for one in rule:
            yield from _inserted(one)
    elif isinstance(rule, dict):
        for name in ("content", "prepend", "replacement"):
            if isinstance(found := rule.get(name), str):
                yield found
        for one in rule.values():
            yield from _inserted(one)
