# ruff: noqa: RUF001
"""Cuts a document into sentences by rule: fast enough (tens of MB/s) to cost little next to the tokenizer.

A newline is always a boundary. Within a line:

- After `.`, `!`, `?`, an ellipsis and other Latin marks, if white space follows, unless a known
  abbreviation, an initial or a dotted form (`e.g.`, `U.S.`) ends there, or a lowercase letter follows.
- After any other mark that Unicode calls Sentence_Terminal (the full stops of Chinese, Hindi, Urdu, Armenian,
  Ethiopic, Burmese, Khmer and some fifty more scripts), with or without space; also after Tibetan's shad and two
  Ethiopic word spaces, which serve as one. A full-width stop before a digit is a decimal point.
- Thai and Lao have no such mark: they put a space between clauses, and none between words. There a space between
  two letters is a boundary, but not a space next to a digit or a repetition mark.

If the language is given, its own rules replace these rules or are added to them:

- Chinese and Japanese: a run of marks (full stop, exclamation and question mark, full-width or not; two ellipsis signs,
  or six full stops) ends a sentence, with or without space; closing quotation marks and brackets after it belong to it.
  No sentence ends before a mark that continues it (a comma, a colon, a closing mark), so that `“走吧！”，他说` is one
  sentence, at a half-width mark inside a Latin word or number (`Yahoo!Japan`, `3.5`), or at a single ellipsis.
- Others: abbreviations, whose full stop does not end a sentence; in German also after a number of one or two digits.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_service.characters import CharacterClasses

Language = Literal["any", "zh", "ja", "de", "es", "fr", "it", "nl", "pt", "ru"]

UNSPACED_LANGUAGES: tuple[Language, ...] = ("zh", "ja")  # no spaces between words or sentences

_UNSPACED_CLOSERS = "\"'”’»›)\\]}」』）】》〉〕"  # closing marks in Chinese and Japanese, for a character class
_MARKS_WITHOUT_BOUNDARY_BEFORE = "，、；：,;:。．！？!?…" + _UNSPACED_CLOSERS
_LATIN_ALPHANUMERIC = "A-Za-z0-9"
_FIRST_UNSPACED_MARKS = "。！？｡!?．"  # marks that may end a sentence in Chinese and Japanese
# A match starts only at the first mark of a run, because all marks of a run would match to the same end, and matching a
# long run from each of its marks takes quadratic time. A single ellipsis does not end a sentence.
_UNSPACED_BOUNDARY = re.compile(
    rf"(?:(?=[{_FIRST_UNSPACED_MARKS}…])(?<![{_FIRST_UNSPACED_MARKS}])(?<!……)(?<![{_FIRST_UNSPACED_MARKS}]…)"
    rf"(?:[。！？｡]|…{{2}}|(?<![{_LATIN_ALPHANUMERIC}])[!?]|[!?](?![{_LATIN_ALPHANUMERIC}])|(?<!\d)．|．(?!\d))|\.{{6}})"
    rf"[{_FIRST_UNSPACED_MARKS}…]*+[{_UNSPACED_CLOSERS}]*+(?P<space>\s*+)(?=[^\s{_MARKS_WITHOUT_BOUNDARY_BEFORE}])"
    rf"|(?<=[{_LATIN_ALPHANUMERIC}])\.[{_UNSPACED_CLOSERS}]*+(?P<latin>\s++)(?=[^\sa-z{_MARKS_WITHOUT_BOUNDARY_BEFORE}])"
)
_GERMAN_ORDINAL = re.compile(r"\d{1,2}")
_ABBREVIATION_LISTS: Mapping[Language, str] = {
    "de": "abb abs art bd bzw ca dr evtl geb ggf hrsg inkl jh jhd kap max min mio mrd nr prof red s sog st str tab "
    "tel u usf usw vgl z zit",
    "es": "art av avda cap dr dra ej etc fig gral lic núm pág págs prof profa sr sra srta sta sto tel ud uds vol",
    "fr": "art av boul cap ch dr env etc ex fig me mgr mlle mm mme no p pp prof réf st ste t tél vol",
    "it": "art avv cap dott dr ecc es fig ing nr on pag pagg prof prot sig sigg tab tel vol",
    "nl": "afb art blz bv ca dhr dr drs ds enz fig hfst incl ing ir max mevr min mr mw nl nr prof resp st tab tel vgl",
    "pt": "art av cap dr dra etc ex fig exmo núm pág págs prof profa sr sra srta tel vol",
    "ru": "акад г гг г-н г-жа др им кв млн млрд напр обл пер пл пр проф рис руб см ср ст стр т табл тел тыс ул ч",
}
_ABBREVIATION_SETS = {language: frozenset(words.split()) for language, words in _ABBREVIATION_LISTS.items()}


def unspaced_boundaries(line: str) -> Iterator[tuple[int, int]]:
    """Yield (end of a sentence, start of the next) in a line of Chinese or Japanese."""
    for match in _UNSPACED_BOUNDARY.finditer(line):
        yield match.start(match.lastgroup or ""), match.end()


def is_abbreviation(word: str, language: Language) -> bool:
    """Return whether `word` before a full stop is an abbreviation in this language, or an ordinal in German."""
    if language == "de" and _GERMAN_ORDINAL.fullmatch(word):
        return True
    return word.lower() in _ABBREVIATION_SETS.get(language, ())


# Sentence_Terminal of Unicode 16's PropList.txt, in ASCII and in general and supplemental punctuation:
_LATIN_MARKS = r"!.?\u2024\u203C\u203D\u2047-\u2049\u2E2E\u2E3C\u2E53\u2E54\u2E60\u2E61"
# Sentence_Terminal in all other Unicode blocks, without the full-width full stop:
_OTHER_MARKS = (
    r"\u0589\u061D-\u061F\u06D4\u0700-\u0702\u07F9\u0837\u0839\u083D\u083E\u0964\u0965\u104A\u104B"
    r"\u1362\u1367\u1368\u166E\u1735\u1736\u17D4\u17D5\u1803\u1809\u1944\u1945\u1AA8-\u1AAB"
    r"\u1B4E\u1B4F\u1B5A\u1B5B\u1B5E\u1B5F\u1B7D-\u1B7F\u1C3B\u1C3C\u1C7E\u1C7F\u2CF9-\u2CFB\u3002"
    r"\uA4FF\uA60E\uA60F\uA6F3\uA6F7\uA876\uA877\uA8CE\uA8CF\uA92F\uA9C8\uA9C9\uAA5D-\uAA5F"
    r"\uAAF0\uAAF1\uABEB\uFE12\uFE15\uFE16\uFE52\uFE56\uFE57\uFF01\uFF1F\uFF61"
    r"\U00010A56\U00010A57\U00010F55-\U00010F59\U00010F86-\U00010F89\U00011047\U00011048"
    r"\U000110BE-\U000110C1\U00011141-\U00011143\U000111C5\U000111C6\U000111CD\U000111DE\U000111DF"
    r"\U00011238\U00011239\U0001123B\U0001123C\U000112A9\U000113D4\U000113D5\U0001144B\U0001144C"
    r"\U000115C2\U000115C3\U000115C9-\U000115D7\U00011641\U00011642\U0001173C-\U0001173E\U00011944"
    r"\U00011946\U00011A42\U00011A43\U00011A9B\U00011A9C\U00011C41\U00011C42\U00011EF7\U00011EF8"
    r"\U00011F43\U00011F44\U00016A6E\U00016A6F\U00016AF5\U00016B37\U00016B38\U00016B44"
    r"\U00016D6E\U00016D6F\U00016E98\U0001BC9F\U0001DA88"
)
_FULL_WIDTH_STOP = r"\uFF0E"
SENTENCE_TERMINAL = re.compile(f"[{_LATIN_MARKS}{_OTHER_MARKS}{_FULL_WIDTH_STOP}]")

_SPACED_MARKS = _LATIN_MARKS + "…"  # these end a sentence only before white space
_UNSPACED_MARKS = _OTHER_MARKS + r"\u0F0D-\u0F12"  # these end a sentence with or without white space
_SENTENCE_MARKS = _SPACED_MARKS + _UNSPACED_MARKS + _FULL_WIDTH_STOP
# Thai and Lao letters: a space after one may end a clause.
_CLAUSE_LETTERS = r"\u0E01-\u0E2E\u0E30-\u0E3A\u0E40-\u0E45\u0E47-\u0E4E\u0E81-\u0EC5\u0EC8-\u0ECE"
_CLOSERS = "\"'”’»›)\\]}」』）"  # closing quotation marks and brackets, for a character class

# The pattern begins with one character class, which `re` finds quickly; one range covers all marks above U+FFFF.
_FIRST_CHARACTERS = re.sub(r"\\U[0-9A-F]{8}-?", "", _SENTENCE_MARKS) + r"\U00010A56-\U0001DA88\u1361" + _CLAUSE_LETTERS
_SENTENCE_BOUNDARY = re.compile(
    rf"[{_FIRST_CHARACTERS}](?:"
    rf"(?<=[{_SPACED_MARKS}])(?![{_SENTENCE_MARKS}])[{_CLOSERS}]*+(?P<space>\s++)(?=\S)"
    rf"|(?:(?<=[{_UNSPACED_MARKS}])|(?<={_FULL_WIDTH_STOP})(?!\d)|(?<=\u1361\u1361))(?!\s*+[{_UNSPACED_MARKS}{_FULL_WIDTH_STOP}]|[{_SPACED_MARKS}])"
    rf"[{_CLOSERS}]*+(?P<wide>\s*+)(?=\S)"
    rf"|(?<=[{_CLAUSE_LETTERS}])(?P<clause>\s++)(?=[\u0E01-\u0E2E\u0E40-\u0E44\u0E81-\u0EAE\u0EC0-\u0EC4]))"
)
_SENTENCE_MARK_PATTERN = re.compile(f"[{_SENTENCE_MARKS}]")
_FULL_STOPS = ".\u2024"  # full stops, which may belong to an abbreviation
_OPENING_MARKS = "\"'“‘«‹([{「『（"
_CLOSING_MARK_SET = frozenset(_CLOSERS.replace("\\", ""))
# Number of characters before a full stop that are examined; abbreviations are shorter.
_MAX_ABBREVIATION_CHARACTERS = 16
_ABBREVIATIONS = frozenset(
    """
    al approx apr assoc aug ave bros ca cap capt cf ch co col corp dec dept dr ed eds eq est etc feb fig figs
    fr gen gov hon inc jan jr jul jun lt ltd maj messrs mr mrs ms mt nos nov oct p pp prof pt ref refs rep res
    rev sec sen sep sept ser sgt sr st vol vols vs
    """.split()  # noqa: SIM905
)
# Classes of characters, as bits.
_SPACE, _NEWLINE, _LOWER, _NARROW_MARK, _CLOSER, _UNSPACED_MARK, _STOP, _PLAIN = (1 << bit for bit in range(8))
_CHARACTER_CLASS_PATTERNS = {
    _SPACE: r"\s",
    _NEWLINE: r"\n",
    _LOWER: "[a-z]",
    _NARROW_MARK: f"[{_SPACED_MARKS}]",
    _CLOSER: f"[{_CLOSERS}]",
    _UNSPACED_MARK: f"[{_UNSPACED_MARKS}{_FULL_WIDTH_STOP}\u1361{_CLAUSE_LETTERS}]",
    _STOP: f"[{_FULL_STOPS}]",
    _PLAIN: "[A-Z0-9]",  # characters that may begin a sentence
}
_LAST_MARK_CODE_POINT = 0x1DA88  # the largest code point in a class


@cache
def _character_classes() -> CharacterClasses:
    every = "".join(map(chr, range(_LAST_MARK_CODE_POINT + 1)))
    found = CharacterClasses()
    for bit, pattern in _CHARACTER_CLASS_PATTERNS.items():
        found.table[[match.start() for match in re.finditer(pattern, every)]] |= bit
    return found


def sentence_bounds(text: str, language: Language = "any") -> NDArray[np.int64]:
    """Return [S, 2] int64: (end of a sentence, start of the next) in characters, for each boundary inside a document.

    Between the two is only white space, or nothing. `language`: language whose own rules are used, too.
    """
    classes = _character_classes().classify(text)
    if language in UNSPACED_LANGUAGES or (classes & _UNSPACED_MARK).any():
        return np.array(list(_bounds_by_line(text, language)), dtype=np.int64).reshape(-1, 2)
    space = classes & _SPACE
    edges = np.flatnonzero(space[1:] != space[:-1]) + 1
    edges = edges[space[0] :] if len(space) else edges  # white space before the first sentence is not a boundary
    bounds = edges[: len(edges) // 2 * 2].reshape(-1, 2)
    newlines = np.flatnonzero(classes & _NEWLINE != 0)
    # Line ends are fewer than runs of white space, so each line end is looked up in the runs.
    run = np.searchsorted(edges[::2], newlines, side="right") - 1
    chosen = np.zeros(len(bounds) + 1, dtype=np.bool_)
    chosen[run] = True  # the last element is for line ends outside of all sentences
    chosen = chosen[: len(bounds)]
    before = classes.take(bounds[:, 0] - 1)
    marked = np.flatnonzero((before & (_NARROW_MARK | _CLOSER) != 0) & ~chosen)
    closed = before[marked] & _CLOSER != 0
    marks = np.maximum(bounds[marked, 0] - 1 - closed, 0)  # 0 if the text begins with a closing mark
    before, behind = classes.take(marks), classes.take(bounds[marked, 1])
    usual = (before & _NARROW_MARK > 0) & (behind & _PLAIN > 0)
    chosen[marked[usual]] = True
    stops = usual & (before & _STOP > 0)
    chosen[marked[stops]] = _full_stops_end_sentences(
        text, bounds, runs=marked[stops], marks=marks[stops], language=language
    )
    rest = marked[~usual & (behind & _LOWER == 0)]
    for number, (stop, following) in zip(rest.tolist(), bounds[rest].tolist(), strict=True):
        mark = stop - 1
        while mark and text[mark] in _CLOSING_MARK_SET:
            mark -= 1
        chosen[number] = classes[mark] & _NARROW_MARK and _mark_ends_sentence(text, mark, following, language)
    return bounds.take(np.flatnonzero(chosen), axis=0)


def _full_stops_end_sentences(
    text: str,
    bounds: NDArray[np.int64],
    *,
    runs: NDArray[np.int64],
    marks: NDArray[np.int64],
    language: Language,
) -> list[bool]:
    """Return for each full stop at `marks` whether it ends a sentence. `runs`: numbers of the runs of white space after
    the full stops; the character after each run is one that may begin a sentence."""
    words = bounds[runs - 1, 1]
    words[(runs == 0) | (marks - words > _MAX_ABBREVIATION_CHARACTERS)] = 0
    return [
        _does_full_stop_end_sentence(text[word:mark], language)
        if word and text[word - 1] in " \n"
        else _mark_ends_sentence(text, mark, following, language)
        for word, mark, following in zip(words.tolist(), marks.tolist(), bounds[runs, 1].tolist(), strict=True)
    ]


def split_sentences(text: str, language: Language = "any") -> list[str]:
    """Return the sentences of a document; none if it is blank. Joined, they are the document; white space at a boundary
    belongs to the later sentence."""
    if not text.strip():
        return []
    ends = [0, *sentence_bounds(text, language)[:, 0].tolist(), len(text)]
    return [text[start:stop] for start, stop in pairwise(ends)]


def _bounds_by_line(text: str, language: Language) -> Iterator[tuple[int, int]]:
    """Yield `sentence_bounds` line by line, for a text whose sentences may end without a space."""
    end, line_start = -1, 0
    for line in text.split("\n"):
        stripped = line.strip()
        if stripped:
            start = line_start + len(line) - len(line.lstrip())
            if end >= 0:
                yield end, start
            yield from ((start + stop, start + resume) for stop, resume in _boundaries_in_line(stripped, language))
            end = start + len(stripped)
        line_start += len(line) + 1


def _boundaries_in_line(line: str, language: Language) -> Iterator[tuple[int, int]]:
    """Yield (end of a sentence, start of the next)."""
    if language in UNSPACED_LANGUAGES:
        yield from unspaced_boundaries(line)
        return
    for match in _SENTENCE_BOUNDARY.finditer(line):
        kind = match.lastgroup or ""
        if kind != "space" or _mark_ends_sentence(line, match.start(), match.end(), language):
            yield match.start(kind), match.end()


def _mark_ends_sentence(text: str, mark: int, following: int, language: Language) -> bool:
    """Return whether the mark at `mark` ends a sentence if the next word begins at `following`."""
    first = text[following]
    if first in _OPENING_MARKS and following + 1 < len(text):
        first = text[following + 1]
    if first.islower():
        return False
    before = text[mark - 1] if mark else ""
    if text[mark] not in _FULL_STOPS or _SENTENCE_MARK_PATTERN.match(before):
        return True
    line = text[max(0, mark - _MAX_ABBREVIATION_CHARACTERS) : mark].rpartition("\n")[2].lstrip()
    return _does_full_stop_end_sentence(line[line.rfind(" ") + 1 :], language)


@lru_cache(maxsize=1 << 14)
def _does_full_stop_end_sentence(word: str, language: Language) -> bool:
    """Return whether a full stop after `word`, which may begin with opening marks, ends a sentence."""
    if _SENTENCE_MARK_PATTERN.match(word[-1:]):
        return True
    word = word.lstrip(_OPENING_MARKS)
    if is_abbreviation(word, language) or "." in word or (len(word) == 1 and word.isupper()):
        return False
    return word.lower() not in _ABBREVIATIONS
