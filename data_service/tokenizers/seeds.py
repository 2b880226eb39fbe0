"""Finds the pieces with which SentencePiece's unigram training begins, in counted words.

SentencePiece finds them by a suffix array over all of the text, which takes 20 bytes a character; in counted words it
looks at each word twice, whatever its count. They are what it would find in text of one word a line: strings of 2 to 16
characters that occur more often than any that continues them.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from data_service.tokenizers.word_counts import code_points
from data_service.tokenizers.words import SPACE

_LONGEST = 16  # characters of a piece, as SentencePiece's max_sentencepiece_length
_MOST = 4_000_000  # strings; SentencePiece drops those of several scripts, and keeps a million


def seed_pieces(words: Sequence[str], counts: NDArray[np.int64]) -> Iterator[tuple[str, int]]:
    """Yield (string, occurrences), by the number of characters that the occurrences cover. Equal ones stand in order of
    length and of the words.

    Args:
        words: distinct words without the space before them.
        counts: [words] int64.
    """
    codes = code_points(f"{SPACE}{word}" for word in words)
    alphabet, characters = np.unique(codes, return_inverse=True)
    ends = np.flatnonzero(alphabet[characters] == ord("\n"))
    weights = np.repeat(counts, np.diff(ends, prepend=-1))
    stops = np.repeat(ends, np.diff(ends, prepend=-1))
    places, strings = np.arange(len(characters)), np.zeros(len(characters), np.int64)
    first, totals = np.zeros(1, np.int64), np.zeros(1, np.int64)
    found = []
    for length in range(1, _LONGEST + 2):
        inside = places + length <= stops[places]
        places, strings = places[inside], strings[inside]
        longer, begins, index = np.unique(
            strings * len(alphabet) + characters[places + length - 1], return_index=True, return_inverse=True
        )
        sums = np.zeros(len(longer), np.int64)
        np.add.at(sums, index, weights[places])
        most = np.zeros(len(totals), np.int64)
        np.maximum.at(most, longer // len(alphabet), sums)
        if length > 2:
            branching = np.flatnonzero((totals > most) & (totals > 1))
            found.append((first[branching], totals[branching], np.full(len(branching), length - 1)))
        first, totals = places[begins], sums
        places, strings = places[sums[index] > 1], index[sums[index] > 1]
    begins, totals, lengths = map(np.concatenate, zip(*found, strict=True))
    for number in np.argsort(-totals * lengths, kind="stable")[:_MOST].tolist():
        string = codes[begins[number] : begins[number] + lengths[number]].tobytes().decode("utf-32-le")
        yield string, int(totals[number])
