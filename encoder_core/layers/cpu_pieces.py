"""The pieces in which a CPU computes attention: so many scores that they stay in the processor's cache.

They are apart from the kernels, so that counting what a layer saves does not import torch.
"""

from collections.abc import Iterator

PIECE_SCORES = 2**18  # scores per piece: 1 MiB in fp32, about an L2 cache
BLOCK_QUERIES = 64  # least number of queries whose scores in a window are computed together

Bounds = tuple[tuple[int, int], ...]


def local_pieces(
    bounds: Bounds, heads: int, window: int | None, *, causal: bool = False
) -> Iterator[tuple[int, slice, slice, slice]]:
    """Yield the start of a row, and slices of queries, keys and heads.

    A row is one piece. If a window is shorter than the row, pieces are blocks of its queries with the keys in their
    reach. In `causal` rows they are blocks of queries with no key later than the last of them.
    """
    for start, stop in bounds:
        reach = stop - start if window is None else window
        whole = stop - start <= reach + 1
        block = max(BLOCK_QUERIES, 0 if whole else reach) if causal or not whole else stop - start
        for first in range(start, stop, block):
            queries = slice(first, min(first + block, stop))
            keys = slice(max(start, first - reach), min(stop, queries.stop + (0 if causal else reach)))
            scores = (queries.stop - first) * (keys.stop - keys.start)
            for together in head_groups(heads, scores):
                yield start, queries, keys, together


def pieces_across(
    bounds: Bounds, key_bounds: Bounds, heads: int
) -> Iterator[tuple[int, slice, slice, slice]]:
    """Yield the same where the keys of row i are row `key_bounds[i]` of other tokens; the start is that of the keys."""
    for (start, stop), (first, last) in zip(bounds, key_bounds, strict=True):
        for together in head_groups(heads, (stop - start) * (last - first)):
            yield first, slice(start, stop), slice(first, last), together


def head_groups(heads: int, scores: int) -> Iterator[slice]:
    """Yield slices of heads, each as many as stay within `PIECE_SCORES` scores; a head has `scores`."""
    together = max(1, min(heads, PIECE_SCORES // scores))
    for head in range(0, heads, together):
        yield slice(head, min(head + together, heads))
