"""Kept baselines are those of the held-out rows that the run evaluates, whatever its starts change."""

import random
import shutil
from pathlib import Path

import pytest

from checkpoints.attempt import Owner, claim
from checkpoints.gather import SingleRank
from data_service.corpus.corpus import open_corpus
from data_service.corpus.remove import documents_by_number, remove_documents
from launcher.observe.inspect.baselines import compute_baselines, load_or_compute_baselines
from launcher.observe.watch.live import stored_baselines
from launcher.runtime.rank.resume import agree_on_removals
from launcher.runtime.run.outline import open_outline
from launcher.runtime.run.record import open_run
from launcher.runtime.run.removals import REMOVALS_PREFIX
from tests.support.runs.small_runs import new_run, operate, reconciled


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
    run.store.put(f"{REMOVALS_PREFIX}000009.json", b"{")
    assert stored_baselines(open_outline(run.uri)) == {}  # the page is drawn without them
