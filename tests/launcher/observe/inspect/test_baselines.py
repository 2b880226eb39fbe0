"""The baselines against counts made by hand, and on a real run."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from data_service.samples.samples import Samples
from data_service.types import Block
from launcher.observe.inspect.baselines import (
    BigramCounts,
    HeldoutTargets,
    compute_baselines,
    find_heldout_targets,
    load_or_compute_baselines,
)
from launcher.observe.inspect.kept_baselines import BASELINES_KEY
from launcher.runtime.run.record import open_run
from launcher.runtime.run.sealed import sealed_bytes


def block(*documents: list[int]) -> Block:
    """One sentence a document."""
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    ends = np.cumsum([0, *map(len, documents)])
    return Block(tokens, ends, np.arange(len(documents) + 1))


def test_bigram_probabilities_are_witten_and_bells() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 9, size=rng.integers(1, 30)).tolist() for _ in range(40)]
    pairs = BigramCounts(10)
    pairs.add(block(*documents[:25]))
    pairs.add(block(*documents[25:]))
    unigram = np.full(10, 0.1)
    together = Counter(pair for document in documents for pair in pairwise(document))
    for h in range(10):
        followers = {w: count for (left, w), count in together.items() if left == h}
        ids = np.arange(10)
        found = pairs.probabilities(HeldoutTargets(ids, np.full(10, h)), unigram)
        seen, kinds = sum(followers.values()), len(followers)
        expected = [(followers.get(w, 0) + kinds * 0.1) / (seen + kinds) if seen else 0.1 for w in range(10)]
        np.testing.assert_allclose(found, expected)
        assert found.sum() == pytest.approx(1.0)


def test_a_target_without_neighbour_is_guessed_by_frequency() -> None:
    pairs = BigramCounts(4)
    pairs.add(block([1, 2, 3]))
    unigram = np.array([0.1, 0.2, 0.3, 0.4])
    assert pairs.probabilities(HeldoutTargets(np.array([2]), np.array([-1])), unigram) == [0.3]
    assert BigramCounts(4).probabilities(HeldoutTargets(np.array([2]), np.array([1])), unigram) == [0.3]


def test_the_neighbour_is_the_true_token_not_what_stands_there() -> None:
    tokens = np.array([0, 9, 9, 7, 2], dtype=np.uint16)  # <s> <mask> <mask> 7 </s>, was <s> 5 6 7 </s>
    samples = Samples(tokens, np.array([0, 5]), np.array([1, 2]), np.array([5, 6], dtype=np.uint16))
    special = np.isin(np.arange(10), [0, 2, 9])
    found = find_heldout_targets(samples, special)
    assert (found.ids.tolist(), found.left.tolist()) == ([5, 6], [-1, 5])


def test_baselines_of_a_run_are_computed_once_and_kept(fresh_run: str) -> None:
    run = open_run(fresh_run)
    first = load_or_compute_baselines(run)
    assert 0 < first.bigram < first.unigram < math.log(320)
    assert first.targets > 20
    assert run.store.size(BASELINES_KEY) is not None
    assert load_or_compute_baselines(run) == first == compute_baselines(run)


def test_baselines_of_what_the_run_was_before_are_not_reused(fresh_run: str) -> None:
    run = open_run(fresh_run)
    stale = load_or_compute_baselines(run).model_copy(update={"unigram": 1.0, "fingerprint": "another"})
    run.store.put(BASELINES_KEY, sealed_bytes(stale))
    assert load_or_compute_baselines(run).unigram != 1.0
    run.store.put(BASELINES_KEY, b"damaged")
    assert load_or_compute_baselines(run).unigram != 1.0
