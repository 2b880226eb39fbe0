"""Finds held-out text of one corpus in the training text of another. Corpora with the same held-out rule hold out the
same text. With different rules, a common text may be held out of one and trained on in the other.

Token runs of `RUN_TOKENS` tokens are compared by hash. `RUNS_PER_DOCUMENT` evenly spread runs of each held-out document
are tested (all runs of a short one); it counts as found if at least half of them are found. So a copy in which a few
words differ is found, and a document that shares one common sentence is not. All runs of the training text are looked
up. A run's hash is a polynomial in its tokens modulo 2**64, computed from prefix sums over the tokens of a block (Karp
and Rabin 1987).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.corpus import Corpus
from data_service.corpus.manifest import BlockTable, CorpusManifest
from data_service.corpus.reader import read_block
from data_service.corpus.removals import RemovedDocuments, load_removals, replace_removed_text
from data_service.store.base import parallel_map
from data_service.types import Block

RUN_TOKENS, RUNS_PER_DOCUMENT = 32, 8  # length of a run; runs that are tested of a held-out document
_FILTER_BITS = 22  # hash bits that index the filter, which rejects nearly all runs that are not held out
_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, which is odd: a factor that mixes bits well
_MIX_FACTOR = np.uint64(0xD6E8FEB86659FD93)  # odd, so that multiplying by it is invertible
_MIX_SHIFT_BITS = np.uint64(32)  # shift by which the hash mixes high bits into low ones
_REMOVED_TOKEN = np.uint64(1 << 32)  # hashed in place of a removed document's tokens: larger than any token id
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Overlap:
    """Amount of one corpus's held-out text, and how much of it is training text of another corpus.

    Attributes:
        documents, tokens: numbers of held-out documents and tokens.
        found, found_tokens: numbers of held-out documents and tokens in the training text of the other corpus.
        first: number of the first held-out document that is found; None if none is.
    """

    documents: int
    tokens: int
    found: int
    found_tokens: int
    first: int | None

    @property
    def token_share(self) -> float:
        """Share of the held-out tokens that are training text."""
        return self.found_tokens / max(1, self.tokens)


def rules_exclude_overlap(heldout_manifest: CorpusManifest, training_manifest: CorpusManifest) -> bool:
    """Return whether the held-out rules alone guarantee that the text held out of the first corpus is not trained on in
    the second."""
    one, other = heldout_manifest.effective_heldout_rule, training_manifest.effective_heldout_rule
    if not (heldout_manifest.may_have_unknown_tokens and training_manifest.may_have_unknown_tokens):
        one = replace(one, by_tokens=other.by_tokens)  # `by_tokens` matters only for unknown tokens
    whole = one.unit == other.unit == "document" and replace(one, below=other.below) == other
    return one == other or (whole and one.below <= other.below) or not len(heldout_manifest.heldout)


def find_overlap(
    heldout_corpus: Corpus,
    training_corpus: Corpus,
    report: Callable[[int, int], None] = lambda more, total: None,
) -> Overlap:
    """Look for the held-out text of one corpus in the training text of another of the same tokenizer.

    Removed documents are ignored in both corpora. Memory: 100 bytes per held-out document, and about 50 blocks.

    Args:
        report: function that is called with the number of blocks just read, and of all.

    Raises:
        CorpusError, CorruptBlock, StoreError: a corpus cannot be read.
    """
    total = len(heldout_corpus.manifest.heldout) + len(training_corpus.manifest.train)
    index = HeldoutIndex()
    for block in _read_blocks(heldout_corpus, "heldout"):
        index.add_block(block)
        report(1, total)
    index.sort_hashes()
    for block in _read_blocks(training_corpus, "train"):
        index.match_block(block)
        report(1, total)
    return index.compute_overlap()


def _read_blocks(corpus: Corpus, split: str) -> Iterator[Block]:
    """Yield the blocks of a split. Token 0 replaces all tokens of removed documents."""
    table: BlockTable = corpus.manifest.train if split == "train" else corpus.manifest.heldout
    removed: RemovedDocuments = load_removals(corpus.store, corpus.manifest).removed_documents(split)

    def read_without_removed(number: int) -> Block:
        return replace_removed_text(read_block(corpus.store, table, number), removed.token_ranges(number), 0)

    yield from parallel_map(read_without_removed, range(len(table)))


class HeldoutIndex:
    """The token runs of held-out documents, by hash, and which of them were found in training text."""

    def __init__(self) -> None:
        self._hashes, self._owners, self._sizes = list[Hashes](), list[int](), list[int]()
        self._numbers = list[int]()
        self._seen = 0

    def add_block(self, block: Block) -> None:
        """Add the documents of a block that were not removed."""
        sums = _prefix_sums(block)
        for start, stop in pairwise(block.sentences[block.documents].tolist()):
            number, self._seen = self._seen, self._seen + 1
            if block.removed is not None and block.removed[start]:
                continue
            last = max(0, stop - start - RUN_TOKENS)
            places = start + np.unique(np.linspace(0, last, RUNS_PER_DOCUMENT if last else 1).astype(np.int64))
            self._hashes.append(_run_hashes(sums, places, np.minimum(places + RUN_TOKENS, stop)))
            self._owners += [len(self._sizes)] * len(places)
            self._sizes.append(stop - start)
            self._numbers.append(number)

    def sort_hashes(self) -> None:
        """Sort the hashes; no document is added afterwards."""
        every = np.concatenate(self._hashes) if self._hashes else np.empty(0, dtype=np.uint64)
        self._keys, self._which = np.unique(every, return_inverse=True)
        self._found = np.zeros(len(self._keys), dtype=np.bool_)
        self._filter = np.zeros(1 << _FILTER_BITS, dtype=np.bool_)
        self._filter[self._keys >> np.uint64(64 - _FILTER_BITS)] = True

    def match_block(self, block: Block) -> None:
        """Mark the token runs of held-out documents that occur in a block of training text. A training document shorter
        than a run is compared as a whole."""
        sums = _prefix_sums(block)
        edges = block.sentences[block.documents]
        short = np.flatnonzero(np.diff(edges) < RUN_TOKENS)
        self._mark_found_hashes(_run_hashes(sums, edges[short], edges[short + 1]))
        if len(block.tokens) >= RUN_TOKENS:
            self._mark_found_hashes(_run_hashes(sums, slice(0, -RUN_TOKENS), slice(RUN_TOKENS, None)))

    def _mark_found_hashes(self, hashes: Hashes) -> None:
        likely = hashes[self._filter[hashes >> np.uint64(64 - _FILTER_BITS)]]
        if len(likely) and len(self._keys):
            places = np.minimum(np.searchsorted(self._keys, likely), len(self._keys) - 1)
            self._found[places[self._keys[places] == likely]] = True

    def compute_overlap(self) -> Overlap:
        """Return the overlap with all blocks that were matched."""
        sizes = np.array(self._sizes, dtype=np.int64)
        owners = np.array(self._owners, dtype=np.int64)
        runs = np.bincount(owners, minlength=len(sizes))
        hits = np.bincount(owners, weights=self._found[self._which], minlength=len(sizes))
        found = 2 * hits >= runs
        return Overlap(
            documents=len(sizes),
            tokens=int(sizes.sum()),
            found=int(found.sum()),
            found_tokens=int(sizes[found].sum()),
            first=self._numbers[int(found.argmax())] if found.any() else None,
        )


def _prefix_sums(block: Block) -> Hashes:
    """Return [T + 1] prefix sums: element t is the sum over tokens i < t of (token i, mixed) * _GOLDEN_RATIO**i."""
    tokens = block.tokens.astype(np.uint64)
    if block.removed is not None:
        tokens[block.removed] = _REMOVED_TOKEN
    factors, _ = _factor_powers(1 << max(1, len(tokens)).bit_length())
    mixed = (tokens + np.uint64(1)) * _MIX_FACTOR
    mixed ^= mixed >> _MIX_SHIFT_BITS
    mixed *= factors[: len(tokens)]
    return np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(mixed)))


def _run_hashes(sums: Hashes, starts: NDArray[np.int64] | slice, stops: NDArray[np.int64] | slice) -> Hashes:
    """Return [R] hashes of the runs [start, stop), which do not depend on where the runs are."""
    _, inverses = _factor_powers(1 << max(1, len(sums) - 1).bit_length())
    found = sums[stops] - sums[starts]
    found *= inverses[: len(sums)][starts]
    for _ in range(2):
        found ^= found >> _MIX_SHIFT_BITS
        found *= _MIX_FACTOR
    return found


@lru_cache(maxsize=4)
def _factor_powers(count: int) -> tuple[Hashes, Hashes]:
    """Return [count] powers of `_GOLDEN_RATIO` modulo 2**64, from power 0 on, and their [count] inverses."""
    found = []
    for factor in (_GOLDEN_RATIO, pow(_GOLDEN_RATIO, -1, 1 << 64)):
        powers = np.full(count, np.uint64(factor))
        powers[0] = 1
        found.append(np.multiply.accumulate(powers))
    return found[0], found[1]
