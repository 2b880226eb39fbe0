"""Encodes texts of any length in bounded memory.

A text of more than `WINDOW_CHARACTERS` is encoded in overlapping windows, since a tokenizer needs some hundred bytes of
memory per token. Two windows are joined at a token around which both have the same tokens. If there is none, as in a
long text without spaces, the text is cut between the windows, and the cut is counted.
"""

from collections.abc import Sequence

import numpy as np

from data_service.tokenizers.quick import TextEncoder
from data_service.tokenizers.tokenizer import PlacedTokens, Tokenizer

WINDOW_CHARACTERS = 1 << 20  # longer texts are encoded in windows
OVERLAP_CHARACTERS = 1 << 12  # characters by which a window extends into each neighbour
_MATCHING_TOKENS_AT_JOINT = 32  # tokens on each side of a joint that both windows must have in common


def encode_in_windows(
    encoder: Tokenizer | TextEncoder,
    texts: Sequence[str],
    window: int = WINDOW_CHARACTERS,
    *,
    by_word: bool = False,
) -> tuple[list[PlacedTokens], int]:
    """Return the tokens of each text, and the number of cuts that may have changed tokens.

    `window`: characters per window, overlap not included. `by_word`: whether tokens of texts that fit into one window
    may have the character ranges of their words (`PlacedTokens.by_word`).
    """
    short = iter(encoder.encode_placed([text for text in texts if len(text) <= window], by_word))
    found, cuts = [], 0
    for text in texts:
        placed, count = _encode_long(encoder, text, window) if len(text) > window else (next(short), 0)
        found.append(placed)
        cuts += count
    return found, cuts


def _encode_long(encoder: Tokenizer | TextEncoder, text: str, window: int) -> tuple[PlacedTokens, int]:
    """Return the tokens of a text longer than a window, and the number of cuts that may have changed tokens."""
    overlap = min(OVERLAP_CHARACTERS, window // 2)

    def encode_range(start: int, stop: int) -> PlacedTokens:
        return encoder.encode_placed([text[start:stop]])[0].shift_characters(start)

    parts: list[PlacedTokens] = []
    # `begin`: first character of the current window; `first`: index in it of the first token not yet in `parts`.
    cuts = begin = first = 0
    current = encode_range(0, window + overlap)
    for middle in range(window, len(text), window):
        following = encode_range(middle - overlap, middle + window + overlap)
        joint = _find_joint(current, following, middle, overlap)
        if joint is None:
            counted_from = current.starts[first] if first < len(current) else middle
            current, following = encode_range(begin, middle), encode_range(middle, middle + window + overlap)
            first = int(np.searchsorted(current.starts, counted_from))
            joint, cuts = (len(current), 0), cuts + 1
        parts.append(current.slice_tokens(first, joint[0]))
        begin = middle if joint[1] == 0 else middle - overlap
        current, first = following, joint[1]
    return PlacedTokens.concatenate([*parts, current.slice_tokens(first, len(current))]), cuts


def _find_joint(left: PlacedTokens, right: PlacedTokens, middle: int, overlap: int) -> tuple[int, int] | None:
    """Return the index in each of two overlapping windows of the token nearest to character `middle` around which both
    have the same tokens; None if there is none. Tokens at the windows' edges may be cut, so they are not compared."""
    low, high = np.searchsorted(left.starts, [middle - overlap, middle + overlap])
    near = left.starts[low:high]
    for place in near[np.argsort(np.abs(near - middle), kind="stable")]:
        i, j = (int(np.searchsorted(window.starts, place)) for window in (left, right))
        before = min(_MATCHING_TOKENS_AT_JOINT, i, j - 1)
        behind = min(_MATCHING_TOKENS_AT_JOINT, len(left) - 1 - i, len(right) - j)
        if min(before, behind) < 1:
            continue
        if left.slice_tokens(i - before, i + behind).equals(right.slice_tokens(j - before, j + behind)):
            return i, j
    return None
