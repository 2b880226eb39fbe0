"""Computes two baselines: the held-out losses of simple count models, which a trained model has to beat.

Both are computed on exactly the tokens that evaluation masks. The unigram baseline predicts every target by its
frequency in the training text. The left-bigram baseline sees the true token to the left (which may be masked for the
model) and knows how often each token followed it. It is interpolated with the unigram as by Witten and Bell (1991,
method C): p(w | h) = (c(h, w) + T(h) p(w)) / (c(h) + T(h)), where T(h) is the number of different tokens seen after h.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.samples.samples import Samples
from data_service.store.errors import StoreError
from data_service.stream.sources import Corpora
from data_service.stream.stream import Stream
from data_service.types import Block
from launcher.observe.inspect.kept_baselines import BASELINES_KEY, Baselines, baselines_fingerprint, load_baselines
from launcher.progress import work
from launcher.runtime.run.inputs import unigram_probabilities
from launcher.runtime.run.record import Run
from launcher.runtime.run.sealed import sealed_bytes
from launcher.runtime.run.streams import heldout_spec, stream_spec

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_log = logging.getLogger(__name__)

_MAX_BIGRAM_TOKENS = 50_000_000  # tokens of training text in which pairs are counted


@dataclass(frozen=True)
class HeldoutTargets:
    """M held-out targets: their ids, and the true token to the left of each (-1 at the start of a text)."""

    ids: Ints
    left: Ints


def load_or_compute_baselines(run: Run) -> Baselines:
    """Return the run's baselines. If the run does not store them, they are computed, and stored if that is possible.

    Raises:
        CorpusError, StoreError: the corpora cannot be read.
    """
    if (stored := load_baselines(run.store, _fingerprint(run))) is not None:
        return stored
    computed = compute_baselines(run)
    try:
        run.store.put(BASELINES_KEY, sealed_bytes(computed))
    except StoreError as error:
        _log.warning("the baselines could not be stored, and will be computed again: %s", error.problem)
    return computed


def compute_baselines(run: Run) -> Baselines:
    """Return the run's baselines, from its held-out rows and up to 50 M tokens of training text."""
    tokenizer = run.tokenizer()
    with work("reading held-out rows"):
        heldout = Stream(heldout_spec(run, tokenizer))
        rows = min(run.recipe.evaluation.samples, heldout.samples_per_epoch)
        targets = find_heldout_targets(heldout.read(0, 0, rows), tokenizer.special_mask)
    unigram = unigram_probabilities(run.recipe)
    pairs = BigramCounts(tokenizer.vocab_size)
    counted = 0
    corpora = Corpora(stream_spec(run, tokenizer, len(run.recipe.phases) - 1))
    total = min(_MAX_BIGRAM_TOKENS, sum(int(table.tokens.sum()) for table in corpora.tables))
    with work("counting pairs of tokens", total, "tokens") as now:
        for block in _training_blocks(corpora):
            pairs.add(block)
            counted += len(block.tokens)
            now.advance(len(block.tokens))
    return Baselines(
        targets=len(targets.ids),
        unigram=float(-np.log(unigram[targets.ids]).mean()),
        bigram=float(-np.log(pairs.probabilities(targets, unigram)).mean()),
        counted=counted,
        fingerprint=_fingerprint(run),
    )


def _fingerprint(run: Run) -> str:
    return baselines_fingerprint(run.record.fingerprint, run.recipe.evaluation.samples, run.removals)


def find_heldout_targets(samples: Samples, special_mask: NDArray[np.bool_]) -> HeldoutTargets:
    """Return the targets of the rows in `samples`. `special_mask` [V] marks ids that are not text, which do not count
    as neighbours."""
    original = samples.tokens.astype(np.int64)
    original[samples.target_positions] = samples.target_ids
    left = original[samples.target_positions - 1]  # a row begins with <s>, which is never a target
    return HeldoutTargets(samples.target_ids.astype(np.int64), np.where(special_mask[left], -1, left))


class BigramCounts:
    """Counts of neighbouring tokens within documents."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._codes: Ints = np.empty(0, dtype=np.int64)  # ascending, a pair's left id * vocab_size + its right id
        self._counts: Ints = np.empty(0, dtype=np.int64)

    def add(self, block: Block) -> None:
        tokens = block.tokens.astype(np.int64)
        inside = np.ones(len(tokens), dtype=np.bool_)
        inside[block.sentences[block.documents[:-1]]] = False  # a document's first token follows nothing
        codes, counts = np.unique((tokens[:-1] * self._vocab + tokens[1:])[inside[1:]], return_counts=True)
        merged, places = np.unique(np.concatenate([self._codes, codes]), return_inverse=True)
        weights = np.concatenate([self._counts, counts])
        self._codes, self._counts = merged, np.bincount(places, weights, len(merged)).astype(np.int64)

    def probabilities(self, targets: HeldoutTargets, unigram: Floats) -> Floats:
        """Return [M], the probability of each target given its left neighbour; its unigram probability without one."""
        history = self._codes // self._vocab
        seen = np.bincount(history, self._counts, self._vocab)  # c(h): occurrences of token h
        # T(h): number of different tokens seen after h.
        kinds = np.bincount(history, minlength=self._vocab).astype(np.float64)
        together = self._lookup_counts(targets.left * self._vocab + targets.ids)  # c(h, w): occurrences of w after h
        alone = unigram[targets.ids]
        mass = seen[targets.left] + kinds[targets.left]
        known = (targets.left >= 0) & (mass > 0)
        mixed = (together + kinds[targets.left] * alone) / np.maximum(mass, 1)
        return np.where(known, mixed, alone)

    def _lookup_counts(self, bigram_codes: Ints) -> Ints:
        if not len(self._codes):
            return np.zeros(len(bigram_codes), dtype=np.int64)
        places = np.minimum(np.searchsorted(self._codes, bigram_codes), len(self._codes) - 1)
        return np.where(self._codes[places] == bigram_codes, self._counts[places], 0)


def _training_blocks(corpora: Corpora) -> Iterator[Block]:
    """Yield evenly spaced blocks (tokens stored together) of all corpora, about `_MAX_BIGRAM_TOKENS` tokens in all."""
    total = sum(int(table.tokens.sum()) for table in corpora.tables)
    share = min(1.0, _MAX_BIGRAM_TOKENS / max(total, 1))
    for source, table in enumerate(corpora.tables):
        wanted = max(1, round(len(table) * share))
        for index in range(wanted):
            yield corpora.read_source_block(source, index * len(table) // wanted)
