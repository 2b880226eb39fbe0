"""The baselines against counts made by hand, and on a real run."""

import math
import random
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from checkpoints.attempt import Owner, claim
from checkpoints.gather import SingleRank
from data_service.corpus.corpus import open_corpus
from data_service.corpus.remove import documents_by_number, remove_documents
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
from launcher.observe.watch.live import stored_baselines
from launcher.runtime.rank.resume import agree_on_removals
from launcher.runtime.run.outline import open_outline
from launcher.runtime.run.record import open_run
from launcher.runtime.run.sealed import sealed_bytes
from tests.support.runs.small_runs import new_run, operate, reconciled


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


@pytest.mark.parametrize("seed", range(3))
def test_baselines_are_of_the_rows_that_the_run_evaluates_now(inputs: Path, tmp_path: Path, seed: int) -> None:
    shutil.copytree(inputs, folder := tmp_path / "inputs")
    run, draw = open_run(new_run(folder, "run")), random.Random(seed)
    corpus, heldout = open_corpus(str(folder / "corpus")), draw.sample(range(4), 2)
    for step in range(6):
        if not heldout or draw.random() < 0.5:
            operate(run.uri, f"evaluation.samples={draw.randint(1, 12)}")
        else:
            documents = documents_by_number(corpus, [f"heldout:{heldout.pop()}", str(draw.randrange(20))])
            remove_documents(corpus, documents, removed_by="x", removed_at=1, reason="asked for")
            now = reconciled(open_run(run.uri), recipe=None, without_removed=True)
            agree_on_removals(now, claim(run.store, owner=Owner.for_this_process(0.0)), step, SingleRank())
        run = open_run(run.uri)
        expected = compute_baselines(run).losses_by_name()
        assert stored_baselines(open_outline(run.uri)) in ({}, expected)
        for _ in range(2):
            assert load_or_compute_baselines(run).losses_by_name() == expected
            assert stored_baselines(open_outline(run.uri)) == expected


def test_baselines_of_what_the_run_was_before_are_not_reused(fresh_run: str) -> None:
    run = open_run(fresh_run)
    stale = load_or_compute_baselines(run).model_copy(update={"unigram": 1.0, "fingerprint": "another"})
    run.store.put(BASELINES_KEY, sealed_bytes(stale))
    assert load_or_compute_baselines(run).unigram != 1.0
    run.store.put(BASELINES_KEY, b"damaged")
    assert load_or_compute_baselines(run).unigram != 1.0
