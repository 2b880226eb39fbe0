"""Documents are removed while a run is under way: it goes on without them from the step at which it resumes, to the
same bits after any kill, and reads nothing else that is different."""

import random
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from checkpoints.attempt import Attempt, newest_attempt_number
from data_service.corpus.corpus import open_corpus
from data_service.corpus.remove import documents_by_number, remove_documents
from data_service.store.open import open_store
from launcher.after.certificate.examine import certify, compare_with_certificate, read_certificate
from launcher.errors import RunChanged
from launcher.observe.inspect.document_selection import removed_documents
from launcher.observe.inspect.exposure import find_exposures
from launcher.runtime.run.fork import fork
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

EXACT = 1e-5  # nats
STOPPED, FORKED = 5, 12


def take_out(folder: Path, seed: int) -> None:
    corpus = open_corpus(str(folder / "corpus"))
    total = int(corpus.table("train").documents.sum())
    numbers = [str(number) for number in random.Random(seed).sample(range(total), 5)]
    found = documents_by_number(corpus, [*numbers, "heldout:0"])
    remove_documents(corpus, found, removed_by="x", removed_at=1, reason="asked for")


@pytest.mark.long
def test_a_run_under_way(folder: Path) -> None:
    undisturbed = finish(small_runs.new_run(folder, "undisturbed"), 1)
    calm, killed, wide = (small_runs.new_run(folder, name) for name in ("calm", "killed", "wide"))
    for run, world in ((calm, 1), (killed, 1), (wide, 2)):
        finish(run, world, stop_at=STOPPED)
    take_out(folder, seed=3)
    with pytest.raises(RunChanged):
        small_runs.operate(killed)
    finish(calm, 1, stop_at=FORKED, without_removed=True)  # saves there; else a save may still be under way
    finish(calm, 1, without_removed=True)
    assert run_group(killed, 1, kill={0: STOPPED + 3}, without_removed=True).codes == [KILLED]
    small_runs.operate(killed)  # is told once
    finish(killed, 1)
    small_runs.ensure_same(killed, calm, small_runs.STEPS)

    finish(wide, 2, without_removed=True)
    assert small_runs.ledger(wide) == small_runs.ledger(calm) == small_runs.ledger(undisturbed)
    assert small_runs.digests(wide) == small_runs.digests(calm)
    assert np.abs(np.subtract(small_runs.losses(wide), small_runs.losses(calm))).max() <= EXACT

    reads = find_exposures(open_run(undisturbed), removed_documents(open_run(undisturbed))).found
    before, after = small_runs.digests(undisturbed), small_runs.digests(calm)
    changed = {step for step in range(small_runs.STEPS) if before[step] != after[step]}
    assert changed == {each.step for each in reads if each.step >= STOPPED}
    assert changed
    found = find_exposures(open_run(killed), removed_documents(open_run(killed)))
    assert set(found.found) == {each for each in reads if each.step < STOPPED}
    (event,) = (each for each in small_runs.history(killed).events if each["kind"] == "removals")
    assert event["step"] == STOPPED

    ensure_certified(killed)
    take_out(folder, seed=4)
    assert compare_with_certificate(killed, read_certificate(killed)).problems == []  # that was not its state
    now = datetime(2026, 5, 1, tzinfo=UTC)
    forked = fork(open_run(calm), f"{folder}/forked", FORKED, (), keep_position=False, now=now)
    assert (forked.restarted, forked.run.record.data_begins) == ((), 0)
    past, history = open_run(calm).removal_history, open_run(f"{folder}/forked").removal_history
    assert [history.states_at(step) for step in (0, 4, 5, 11)] == [past.states_at(step) for step in (0, 4, 5, 11)]
    assert history.states_at(FORKED) != past.states_at(FORKED)
    small_runs.operate(f"{folder}/forked")
    assert small_runs.digests(finish(f"{folder}/forked", 1)) != small_runs.digests(calm)[FORKED:]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments_it_comes_to_equal_bits(folder: Path, world: int, seed: int) -> None:
    """Against the undisturbed run on as many ranks: any rank, at any moment of its life, start after start."""
    draw = random.Random(f"{world} {seed}")
    calm, killed = (small_runs.new_run(folder, f"{name}-{world}-{seed}") for name in ("calm", "killed"))
    at = draw.randint(1, small_runs.STEPS - 1)
    for run in (calm, killed):
        finish(run, world, stop_at=at)
    take_out(folder, seed=100 + 10 * world + seed)
    began = time.monotonic()
    finish(calm, world, without_removed=True)
    life = time.monotonic() - began
    deaths = 0
    for _ in range(6):
        moment = (draw.randrange(world), draw.uniform(0.2, 1.0) * life)
        deaths += KILLED in run_group(killed, world, kill_after=moment, without_removed=True).codes
    finish(killed, world, without_removed=True)
    assert deaths
    small_runs.ensure_same(killed, calm, small_runs.STEPS)
    assert dict(open_run(killed).removal_history.states_at(at)) == dict(open_run(calm).removal_history.newest_states)


def ensure_certified(uri: str) -> None:
    """A changed record of what a run left out is named."""
    store = open_store(uri)
    Attempt(store, newest_attempt_number(store)).record_end(time.time())
    certificate, found = certify(uri)
    assert certificate is not None, found.problems
    key = next(entry.key for entry in store.list("removals/"))
    data = store.get(key)
    store.put(key, data.replace(b'"step":', b'"step": '))
    assert [place for place, _ in compare_with_certificate(uri, certificate).problems] == [f"{uri}/{key}"]
    store.put(key, data)


@pytest.mark.long
def test_a_run_that_is_made_afterwards(tmp_path: Path) -> None:
    """From a corpus of its own, of which no other test has removed anything."""
    small_runs.prepare_corpus(tmp_path)
    take_out(tmp_path, seed=7)
    run = finish(small_runs.new_run(tmp_path, "afterwards"), 1)
    take_out(tmp_path, seed=8)  # is not its state
    report = find_exposures(open_run(run), removed_documents(open_run(run)))
    known = open_run(run).record.inputs.removals["text"]
    assert report.found  # what was removed last
    assert report.left_out
    assert open_run(run).removal_history.states_at(small_runs.STEPS) == {"text": known}
