"""datatrove's quality filters, computed by NumPy arrays: same decisions and reasons as in datatrove 0.10.1.

Each function takes a filter (`block`) of datatrove, for its settings and lists, and a word splitter. It returns a
function that decides about a text. Repetitions are counted by hashes, so the count may be too high because of
collisions. If the count exceeds a limit, datatrove's own function counts again.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_service.prepare.shingles import HASH_FACTOR, mix_bits
from data_service.prepare.words import WordSplitter, WordTable

Decision = tuple[str, str]  # the reason to drop a text ("" to keep it), and the remaining text
_LINE_BREAKS = re.compile("\n+")
_SPACE_HASH = mix_bits(np.array([32], dtype=np.uint64))  # hash of the character " "


def gopher_quality(datatrove_filter: Any, splitter: WordSplitter) -> Callable[[str], Decision]:
    """Return a function that decides like GopherQualityFilter."""

    def drop_reason(text: str) -> str:
        words = splitter.split(text)
        rows, count = words.rows, len(words.rows)
        lengths = rows["length"][~rows["symbols"]]
        if datatrove_filter.min_doc_words and len(lengths) < datatrove_filter.min_doc_words:
            return "gopher_short_doc"
        if datatrove_filter.max_doc_words and len(lengths) > datatrove_filter.max_doc_words:
            return "gopher_long_doc"
        mean = lengths.mean() if len(lengths) else math.nan
        if datatrove_filter.min_avg_word_length and mean < datatrove_filter.min_avg_word_length:
            return "gopher_below_avg_threshold"
        if datatrove_filter.max_avg_word_length and mean > datatrove_filter.max_avg_word_length:
            return "gopher_above_avg_threshold"
        if (most := datatrove_filter.max_symbol_word_ratio) and text.count("#") / count > most:
            return "gopher_too_many_hashes"
        if most and (text.count("...") + text.count("…")) / count > most:
            return "gopher_too_many_ellipsis"
        lines = text.splitlines()
        bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
        if (most := datatrove_filter.max_bullet_lines_ratio) and bullets / len(lines) > most:
            return "gopher_too_many_bullets"
        open_ends = sum(line.rstrip().endswith(("...", "…")) for line in lines)
        if (most := datatrove_filter.max_ellipsis_lines_ratio) and open_ends / len(lines) > most:
            return "gopher_too_many_end_ellipsis"
        if (least := datatrove_filter.max_non_alpha_words_ratio) and int(rows["letters"].sum()) / count < least:
            return "gopher_below_alpha_threshold"
        if (
            datatrove_filter.min_stop_words
            and len(datatrove_filter.stop_words.intersection(words.texts())) < datatrove_filter.min_stop_words
        ):
            return "gopher_enough_stop_words"
        return ""

    return lambda text: (drop_reason(text), text)


def gopher_repetition(block: Any, splitter: WordSplitter) -> Callable[[str], Decision]:
    """Return a function that decides like GopherRepetitionFilter."""

    def drop_reason(text: str) -> str:
        for kind, parts, most, most_characters in (
            ("para", block.paragraph_exp.split(text.strip()), block.dup_para_frac, block.dup_para_char_frac),
            ("line", _LINE_BREAKS.split(text), block.dup_line_frac, block.dup_line_char_frac),
        ):
            repeated, characters = _count_duplicates(parts)
            if most and repeated / len(parts) > most:
                return f"dup_{kind}_frac"
            if most_characters and characters / len(text) > most_characters:
                return f"dup_{kind}_char_frac"
        words = splitter.split(text)
        return _common_ngram_reason(block, words, len(text)) or _repeated_ngrams_reason(block, words, len(text))

    return lambda text: (drop_reason(text), text)


def _count_duplicates(parts: Sequence[str]) -> tuple[int, int]:
    """Return the number of parts that repeat an earlier part, and the number of their characters."""
    from datatrove.pipeline.filters.gopher_repetition_filter import find_duplicates

    if len(set(parts)) == len(parts):
        return 0, 0
    repeated, characters = find_duplicates(parts)
    return repeated, characters


def _common_ngram_reason(block: Any, words: WordTable, size: int) -> str:
    """Return the reason to drop a text of `size` characters if its most common n-gram is too frequent; else ""."""
    from datatrove.pipeline.filters.gopher_repetition_filter import find_top_duplicate, get_n_grams

    hashes, powers, lengths = (words.rows[name].copy() for name in ("hash", "power", "length"))
    hashes += powers * _SPACE_HASH  # hash of the word with a space after it
    powers *= np.uint64(HASH_FACTOR)
    ends = np.cumsum(lengths + 1)
    found, span = hashes, 1
    for count, most in block.top_n_grams:
        found, span = _extend_ngram_hashes(found, hashes, powers, count - span), count
        if not len(found):
            continue
        characters = ends[count - 1 :] - np.append(0, ends[:-count]) - 1
        order = np.argsort(found)
        begins = np.flatnonzero(np.append(True, found[order[1:]] != found[order[:-1]]))
        longest = np.maximum.reduceat(characters[order], begins)
        if int((np.diff(begins, append=len(found)) * longest).max()) / size <= most:
            continue
        if find_top_duplicate(get_n_grams(words.texts(), count)) / size > most:
            return f"top_{count}_gram"
    return ""


def _repeated_ngrams_reason(block: Any, words: WordTable, size: int) -> str:
    """Return the reason to drop a text of `size` characters if repeated n-grams cover too much of it; else ""."""
    from datatrove.pipeline.filters.gopher_repetition_filter import find_all_duplicate

    hashes, powers, lengths = (words.rows[name].copy() for name in ("hash", "power", "length"))
    found, span = hashes, 1
    for count, most in block.dup_n_grams:
        found, span = _extend_ngram_hashes(found, hashes, powers, count - span), count
        ordered = np.sort(found)
        if not (ordered[1:] == ordered[:-1]).any():
            continue
        order = np.argsort(found, kind="stable")
        again = order[1:][found[order[1:]] == found[order[:-1]]]
        covered = np.zeros(len(hashes), dtype=np.bool_)
        for offset in range(count):
            covered[again + offset] = True
        if int(lengths[covered].sum()) / size <= most:
            continue
        if find_all_duplicate(words.texts(), count) / size > most:
            return f"duplicated_{count}_n_grams"
    return ""


def _extend_ngram_hashes(
    runs: NDArray[np.uint64], hashes: NDArray[np.uint64], powers: NDArray[np.uint64], more: int
) -> NDArray[np.uint64]:
    """Return the hashes `runs` of n-grams, extended by `more` words at the beginning of each."""
    for _ in range(more):
        count = max(0, len(runs) - 1)
        runs = hashes[:count] + powers[:count] * runs[1:]
    return runs


def c4_quality(block: Any, splitter: WordSplitter) -> Callable[[str], Decision]:
    """Return a function that decides like C4QualityFilter, but ignores curly brackets: the caller checks them."""
    from datatrove.pipeline.filters import c4_filters as c4

    def clean_line(whole: str) -> str | None:
        """Return the line without citations; None if the line must be dropped."""
        line = c4.CITATION_REGEX.sub("", whole) if block.remove_citations and "[" in whole else whole
        ends = line.endswith(c4.END_PUNCTUATION) and not line.endswith(c4.ELLIPSIS)
        if block.filter_no_terminal_punct and not ends:
            return None
        lengths = [*map(len, whole.split())]
        if len(lengths) < block.min_words_per_line:
            return None
        return None if max(lengths, default=0) > block.max_word_length != -1 else line

    def filter_text(text: str) -> Decision:
        lines = []
        for line in map(clean_line, map(str.strip, text.splitlines())):
            if line is None:
                continue
            lowered = line.lower()
            if block.filter_lorem_ipsum and "lorem ipsum" in lowered:
                return "lorem_ipsum", text
            if block.filter_javascript and "javascript" in lowered:
                continue
            if block.filter_policy and any(map(lowered.__contains__, c4.POLICY_SUBSTRINGS)):
                continue
            lines.append(line)
        if not _has_enough_sentences(block, splitter, lines):
            return "too_few_sentences", text
        return "", "\n".join(lines).strip()

    return filter_text


def _has_enough_sentences(block: Any, splitter: WordSplitter, lines: Sequence[str]) -> bool:
    """Return whether lines have the required number of sentences. Each line counts as at least one."""
    from datatrove.utils.text import split_into_sentences

    least: int = block.min_num_sentences
    missing = least - len(lines)
    for line in lines:
        if missing <= 0:
            return True
        missing -= splitter.split(line).min_sentence_count() - 1
    return missing <= 0 or sum(len(split_into_sentences(line, block.language)) for line in lines) >= least


def fineweb_quality(block: Any, splitter: WordSplitter) -> Callable[[str], Decision]:
    """Return a function that decides like FineWebQualityFilter."""
    stops = frozenset(block.stop_chars)

    def drop_reason(text: str) -> str:
        lines = [line for line in text.split("\n") if not line.isspace() and line]
        if not lines:
            return "empty"
        ratio = sum(line[-1] in stops for line in lines) / len(lines)
        if ratio < block.line_punct_thr and not (ratio == 0 and block.line_punct_exclude_zero):
            return "line_punct_ratio"
        short = block.short_line_length
        if sum(len(line) <= short for line in lines) / len(lines) > block.short_line_threshold:
            return "short_line_ratio"
        breaks = text.count("\n")
        if _count_duplicates(lines)[1] / (len(text) - breaks) > block.char_duplicates_ratio:
            return "char_dup_ratio"
        if breaks / len(splitter.split(text).rows) > block.new_line_ratio:
            return "list_ratio"
        return ""

    return lambda text: (drop_reason(text), text)


FILTER_BY_NAME = {check.__name__: check for check in (gopher_quality, gopher_repetition, c4_quality, fineweb_quality)}
