"""MLM as correction: what stands in place of a word is a similar word of the same length (Cui et al. 2020, sec. 3.1).

Of the chosen words a share is replaced by a similar word, a share by a random one, and the rest is kept. Words that the
table gives no similar word are replaced by random ones. Words of an n-gram are replaced each by itself. A random word
is any word of the table with as many tokens; if there is none, random tokens.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data_service.rng import scale
from data_service.types import Tokens
from data_service.words.similar import SimilarWords

if TYPE_CHECKING:
    from data_service.samples.masking import Replacement, Vocabulary

_DRAWS = 1 << 32


def replaced_words(
    target_ids: Tokens,
    sizes: NDArray[np.int64],
    draws: NDArray[np.uint64],
    replace: "Replacement",
    vocabulary: "Vocabulary",
    table: SimilarWords,
) -> Tokens:
    """[M] what stands in place of the targets.

    Args:
        target_ids: [M] the targets, word after word.
        sizes: [K] tokens of each word.
        draws: [M] uniform 64-bit draws. The upper half of a word's first says what happens to the word, the lower half
            is its random word; the lower halves of all are their random tokens.
        replace, vocabulary, table: see there.
    """
    starts = np.cumsum(sizes) - sizes
    action = draws[starts] >> np.uint64(32)
    bounds = np.cumsum([replace.mask, replace.similar, replace.random])
    masked, similar, random = (action < round(bound * _DRAWS) for bound in bounds)
    similar, random = similar & ~masked, random & ~similar & ~masked
    ids = target_ids.copy()
    ids[np.repeat(masked, sizes)] = vocabulary.mask
    for size in np.unique(sizes[similar | random]).tolist():
        words = np.flatnonzero((sizes == size) & (similar | random))
        places = starts[words][:, None] + np.arange(size)
        ids[places] = _other_words(ids[places], similar[words], draws[places], vocabulary, table)
    return ids


def _other_words(
    words: NDArray[np.unsignedinteger],
    similar: NDArray[np.bool_],
    draws: NDArray[np.uint64],
    vocabulary: "Vocabulary",
    table: SimilarWords,
) -> NDArray[np.unsignedinteger]:
    """[N, s]: for `words` [N, s] of one size their similar words, where `similar` [N] and the table has one; else
    random words. `draws`: [N, s]."""
    low = draws.astype(np.uint32)
    known = table.by_size.get(words.shape[1])
    if known is None:
        return vocabulary.random(low.ravel()).reshape(words.shape)
    found = known.ids[scale(low[:, 0], len(known.ids))]
    number = known.find(words.astype(np.uint32))
    has = similar & (number >= 0) & known.has_similar[number]
    found[has] = known.similar[number[has]]
    return found.astype(words.dtype)
