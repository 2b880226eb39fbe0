"""Finds where words, and a lexicon's phrases and entities, begin in text. Also the options for this, and their record
in the manifest.

Entries of a word list are matched from left to right, the longest at each position. A run of digits, or of letters of a
script with spaces, is never cut: `cat` is not found in `cats`. Marks that combine with the character before them (vowel
signs, accents) are never separated from it.
"""

import hashlib
import io
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any, Literal, Self, assert_never

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from data_service.characters import is_white_space
from data_service.errors import InputError
from data_service.formats import StrictRecord
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store_of_file
from data_service.tokenizers.words import LETTERS_WITHOUT_SPACES
from data_service.types import LEVELS, Level

SegmenterName = Literal["jieba", "longest_match", "field"]


class WordOptions(StrictRecord):
    """Options for finding words, phrases and entities (units) in text.

    Attributes:
        segmenter: how words are found. `jieba`; `longest_match`: the longest words of a file, from left to right;
            `field`: an input field already holds each document's words (output of LTP, HanLP and others). None: only
            phrases and entities are found.
        dictionary: URI of a file of words, for `longest_match`, or to replace jieba's dictionary (`word frequency` a
            line).
        user_words: URI of a file of words to add to jieba's dictionary (`word [frequency] [tag]` a line).
        field: name of the input's field of words. It holds a list of words, a list of sentences that are lists of
            words, or words separated by spaces.
        lexicon: URI of a file of entities and phrases (`text <TAB> entity` or `text <TAB> phrase` a line).
    """

    segmenter: SegmenterName | None = "jieba"
    dictionary: str | None = None
    user_words: str | None = None
    field: str = Field(default="words", min_length=1)
    lexicon: str | None = None

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.segmenter is None and self.lexicon is None:
            raise ValueError("neither a segmenter nor a lexicon is given; give --segmenter, --lexicon or both")
        if self.segmenter == "longest_match" and self.dictionary is None:
            raise ValueError("longest_match takes its words from a dictionary; give one with --dictionary")
        if self.dictionary is not None and self.segmenter not in ("jieba", "longest_match"):
            raise ValueError("only the segmenters jieba and longest_match use a dictionary; leave --dictionary out")
        if self.user_words is not None and self.segmenter != "jieba":
            raise ValueError("only the segmenter jieba uses user words; leave --user-words out")
        return self

    @property
    def input_field(self) -> str | None:
        """Name of the input's field that holds words; None with another segmenter than `field`."""
        return self.field if self.segmenter == "field" else None

    def word_file_uris(self) -> dict[str, str]:
        """Return the URIs of the given word files, by option: `dictionary`, `user_words`, `lexicon`."""
        named = {"dictionary": self.dictionary, "user_words": self.user_words, "lexicon": self.lexicon}
        return {name: uri for name, uri in named.items() if uri is not None}


class Segmentation(StrictRecord):
    """The record of how words, phrases and entities of a corpus were found. It is part of the corpus's identity.

    Attributes:
        segmenter: name of the segmenter; None if words were not looked for.
        version: version of the segmenter.
        field: name of the input's field that held the words; None with another segmenter than `field`.
        dictionary, user_words, lexicon: sha256 (hex) of each file of words; None if it was not given.
    """

    segmenter: SegmenterName | None
    version: str
    field: str | None = None
    dictionary: str | None = None
    user_words: str | None = None
    lexicon: str | None = None

    @property
    def levels(self) -> tuple[Level, ...]:
        """The kinds of units whose starts are stored: words, phrases, entities."""
        words: tuple[Level, ...] = () if self.segmenter is None else ("word",)
        return words if self.lexicon is None else (*words, "phrase", "entity")


_UNSPACED_LETTERS = "".join(f"{chr(first)}-{chr(last)}" for first, last in LETTERS_WITHOUT_SPACES)  # as a-z
_LETTER_RUN = re.compile(rf"[^\W_{_UNSPACED_LETTERS}]{{2,}}")  # letters of scripts with spaces, or digits


class WordList:
    """A list of words that finds its entries in text by longest match."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = frozenset(words)
        lengths: dict[str, set[int]] = {}
        for word in self._words:
            lengths.setdefault(word[0], set()).add(len(word))
        self._lengths = {first: tuple(sorted(found, reverse=True)) for first, found in lengths.items()}

    def find_entries(self, text: str) -> list[tuple[int, int]]:
        """Return (start, end) of the entries in `text`, from left to right, the longest at each position."""
        inside = forbidden_word_starts(text)
        found: list[tuple[int, int]] = []
        at = 0
        while at < len(text):
            stop = 0 if inside[at] else self._longest_entry_end(text, at, inside)
            if stop:
                found.append((at, stop))
            at = stop or at + 1
        return found

    def _longest_entry_end(self, text: str, at: int, forbidden_starts: bytearray) -> int:
        """Return the end of the longest entry that begins at character `at`; 0 if none begins there."""
        for length in self._lengths.get(text[at], ()):
            stop = at + length
            if stop <= len(text) and not forbidden_starts[stop] and text[at:stop] in self._words:
                return stop
        return 0


def forbidden_word_starts(text: str) -> bytearray:
    """Return one byte per character, and one for the end: 1 where no word may begin, that is inside a run of letters or
    digits, or between a character and its combining mark."""
    inside = bytearray(len(text) + 1)
    for run in _LETTER_RUN.finditer(text):
        inside[run.start() + 1 : run.end()] = b"\1" * (run.end() - run.start() - 1)
    if not text.isascii():
        for at, character in enumerate(text):
            if at and unicodedata.category(character)[0] == "M" and not text[at - 1].isspace():
                inside[at] = 1
    return inside


_LONGEST_MATCH_VERSION = "1"  # version of the longest-match rules in this module
_WordSizeFunction = Callable[[str], Iterable[int]]
"""Splits a sentence into words; returns their lengths in characters, which add up to the sentence's."""


def resolve_segmentation(options: WordOptions) -> tuple[Segmentation, dict[str, bytes]]:
    """Read the files that the options name; return the segmentation with their hashes, and their contents by option.

    Raises:
        InputError: a file is missing or has the wrong content, or jieba is not installed.
        StoreError: a file cannot be read.
    """
    files = {name: _read_word_file(uri) for name, uri in options.word_file_uris().items()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    version = str(_import_jieba().__version__) if options.segmenter == "jieba" else _LONGEST_MATCH_VERSION
    found = Segmentation(segmenter=options.segmenter, version=version, field=options.input_field, **hashes)
    UnitFinder(found, files)  # raises InputError if a file cannot be parsed
    return found, files


class UnitFinder:
    """Finds where words, phrases and entities (units) begin in sentences.

    Raises:
        InputError: a word file cannot be parsed; jieba is not installed, or has another version than at the start of
            the build.
    """

    def __init__(self, segmentation: Segmentation, files: Mapping[str, bytes]) -> None:
        self.levels: tuple[Level, ...] = segmentation.levels
        self._segmenter = segmentation.segmenter
        self._sizes = _word_size_function(segmentation, files)
        self._lists: dict[Level, WordList] = {}
        if "lexicon" in files:
            entries = _parse_lexicon(files["lexicon"])
            entities = [text for text, kind in entries.items() if kind == "entity"]
            self._lists = {"phrase": WordList(entries), "entity": WordList(entities)}

    def find_unit_starts(self, sentences: Sequence[str], word_starts: bytes) -> NDArray[np.bool_]:
        """Return [levels, characters] bool: whether a unit of each level begins at each character.

        Args:
            sentences: texts. Their characters are numbered through all of them.
            word_starts: one byte for each character that is not white space: 1 if a word begins with it, else 0. Used
                only with the segmenter `field`.
        """
        size = sum(map(len, sentences))
        starts = np.zeros((len(LEVELS), size), dtype=np.bool_)
        if self._segmenter == "field":
            starts[0, ~is_white_space("".join(sentences))] = np.frombuffer(word_starts, dtype=np.bool_)
        elif self._sizes is not None:
            sizes = np.array([n for sentence in sentences for n in self._sizes(sentence)], dtype=np.int64)
            starts[0, np.cumsum(sizes) - sizes] = True
        for level, words in self._lists.items():
            starts[LEVELS.index(level)] = _entry_starts(sentences, words)
        return starts[[LEVELS.index(level) for level in self.levels]]


def mark_unit_starts(
    starts: NDArray[np.bool_],
    text: str,
    token_places: NDArray[np.int64],
    sentence_first_tokens: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return [levels, T] bool: which tokens begin a unit.

    A token begins a unit if its first character that is not white space is a unit's first. Of several tokens that
    share this character, only the first begins the unit.

    Args:
        starts: [levels, characters] bool, as `UnitFinder.find_unit_starts` returns it.
        text: the joined sentences.
        token_places: [T] int64, offset in `text` of each token's first character.
        sentence_first_tokens: indices of the tokens that begin a sentence.
    """
    size = len(text)
    following = np.where(is_white_space(text), size, np.arange(size))
    following = np.append(np.minimum.accumulate(following[::-1])[::-1], size)
    at = following[token_places]
    first_of_character = np.diff(at, prepend=-1) > 0
    first_of_character[sentence_first_tokens] = True
    found: NDArray[np.bool_] = np.pad(starts, ((0, 0), (0, 1)))[:, at] & first_of_character
    return found


def mark_word_starts(text: str, words: Sequence[str]) -> bytes:
    """Return one byte for each character of `text` that is not white space: 1 if one of `words` begins with it, else 0.

    Raises ValueError: apart from white space, the joined words differ from the text. The message says where.
    """
    plain = ["".join(word.split()) for word in words]
    whole = "".join(text.split())
    if "".join(plain) != whole:
        at = 0
        for number, word in enumerate(plain):
            if not whole.startswith(word, at):
                raise ValueError(f"word {number} is {word[:20]!r}, but the text continues with {whole[at : at + 20]!r}")
            at += len(word)
        raise ValueError(f"after the last word the text continues with {whole[at : at + 20]!r}")
    found = bytearray(len(whole))
    for at in accumulate(map(len, filter(None, plain[:-1])), initial=0):
        if at < len(whole):
            found[at] = 1
    return bytes(found)


def _entry_starts(sentences: Sequence[str], words: WordList) -> NDArray[np.bool_]:
    """Return [characters] bool: false inside an entry of the list after its first character, else true."""
    starts = np.ones(sum(map(len, sentences)), dtype=np.bool_)
    offset = 0
    for sentence in sentences:
        for start, stop in words.find_entries(sentence):
            starts[offset + start + 1 : offset + stop] = False
        offset += len(sentence)
    return starts


def _word_size_function(segmentation: Segmentation, files: Mapping[str, bytes]) -> _WordSizeFunction | None:
    match segmentation.segmenter:
        case "jieba":
            cut = _jieba_tokenizer(segmentation, files).cut
            return lambda sentence: map(len, cut(sentence))
        case "longest_match":
            return partial(_longest_match_sizes, WordList(_parse_words(files["dictionary"], "dictionary")))
        case "field" | None:
            return None
        case other:
            assert_never(other)


def _longest_match_sizes(words: WordList, sentence: str) -> list[int]:
    """Return the lengths of a sentence's words: entries of the list, runs of letters or digits, single characters."""
    inside = forbidden_word_starts(sentence)
    for start, stop in words.find_entries(sentence):
        inside[start + 1 : stop] = b"\1" * (stop - start - 1)
    bounds = [at for at in range(len(sentence)) if not inside[at]] + [len(sentence)]
    return np.diff(bounds).tolist()


def _import_jieba() -> Any:
    try:
        return import_module("jieba")
    except ModuleNotFoundError as error:
        raise InputError(
            "the segmenter jieba needs the package jieba, which is not installed",
            remedy="pip install 'maskfleet[chinese]', or use the segmenter longest_match with a word file",
        ) from error


def _jieba_tokenizer(segmentation: Segmentation, files: Mapping[str, bytes]) -> Any:
    """Return a jieba tokenizer with its dictionary loaded.

    jieba would load it from a cache in the temporary folder, where any user may write.
    """
    jieba = _import_jieba()
    if str(jieba.__version__) != segmentation.version:
        raise InputError(
            f"this machine has jieba {jieba.__version__}, but the build began with jieba {segmentation.version}",
            remedy="install the same version on all machines",
        )
    import_module("jieba.finalseg").Force_Split_Words.clear()  # jieba keeps words of earlier dictionaries there
    tokenizer = jieba.Tokenizer()
    own = files.get("dictionary")
    try:
        source = tokenizer.get_dict_file() if own is None else io.BytesIO(own)
        tokenizer.FREQ, tokenizer.total = tokenizer.gen_pfdict(source)
        tokenizer.initialized = True
        if "user_words" in files:
            tokenizer.load_userdict(io.BytesIO(files["user_words"]))
    except ValueError as error:
        raise InputError(
            f"jieba cannot read the dictionary or the user words: {error}",
            remedy="use UTF-8, and lines of `word frequency` (dictionary) or `word [frequency] [tag]` (user words)",
        ) from error
    return tokenizer


def _numbered_lines(content: bytes, what: str) -> list[tuple[int, str]]:
    """Return (number from 1, text) of the lines that are not blank."""
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"the {what} is not UTF-8: {error}", remedy="convert it to UTF-8") from error
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _parse_words(content: bytes, what: str) -> list[str]:
    """Return the first word of each line. The rest of a line, such as a frequency, is ignored."""
    found = [line.split()[0] for _, line in _numbered_lines(content, what)]
    if not found:
        raise InputError(f"the {what} holds no words", remedy="give a file with one word a line")
    return found


def _parse_lexicon(content: bytes) -> dict[str, Literal["phrase", "entity"]]:
    entries: dict[str, Literal["phrase", "entity"]] = {}
    for number, line in _numbered_lines(content, "lexicon"):
        text, tab, kind = line.rstrip("\r").partition("\t")
        text = text.strip()
        match kind.strip():
            case "phrase" | "entity" as known if tab and text:
                entries.setdefault(text, known)
            case _:
                raise InputError(
                    f"line {number} of the lexicon is not a valid entry: {line[:60]!r}",
                    remedy="write `text <TAB> entity` or `text <TAB> phrase` on each line",
                )
    if not entries:
        raise InputError(
            "the lexicon holds no entry",
            remedy="write `text <TAB> entity` or `text <TAB> phrase` on each line",
        )
    return entries


def _read_word_file(uri: str) -> bytes:
    store, name = open_store_of_file(uri)
    try:
        return store.get(name)
    except KeyMissing as error:
        raise InputError(f"{uri}: there is no such word file", remedy="check the path") from error
