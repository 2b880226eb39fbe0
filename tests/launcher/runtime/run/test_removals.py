"""A run leaves out what was removed from its corpora from a recorded step on, and reads nothing of it again."""

import random
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.attempt import Owner, claim
from checkpoints.errors import DamagedCheckpoint
from checkpoints.gather import SingleRank
from data_service.corpus.corpus import open_corpus
from data_service.corpus.removals import load_removals
from data_service.corpus.remove import documents_by_number, remove_documents
from data_service.errors import CorpusError
from data_service.store.open import open_store
from launcher.errors import RunChanged
from launcher.runtime.rank.resume import agree_on_removals
from launcher.runtime.run.record import RECORD_FILE, Run, open_run
from launcher.runtime.run.removals import (
    REMOVALS_PREFIX,
    CorpusStates,
    RemovalHistory,
    RemovalRecord,
    read_removals,
    write_removals,
)
from launcher.runtime.run.streams import heldout_spec, stream_spec
from tests.support.runs.small_runs import new_run, reconciled

NOW = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture
def folder(inputs: Path, tmp_path: Path) -> Path:
    """A corpus of one's own, and its tokenizer."""
    shutil.copytree(inputs, tmp_path / "inputs")
    return tmp_path / "inputs"


def remove(folder: Path, *names: str) -> str:
    """Remove documents; the state of the corpus after it."""
    corpus = open_corpus(str(folder / "corpus"))
    remove_documents(corpus, documents_by_number(corpus, names), removed_by="x", removed_at=1, reason="asked for")
    return load_removals(corpus.store, corpus.manifest).digest


def states_in(run: Run) -> set[str]:
    """The states of the corpus that the run's streams read."""
    tokenizer = run.tokenizer()
    specs = [stream_spec(run, tokenizer, 0), stream_spec(run, tokenizer, 1), heldout_spec(run, tokenizer)]
    return {spec.sources[0].removals for spec in specs}


def again(run: Run, *, without_removed: bool = False) -> Run:
    return reconciled(open_run(run.uri), recipe=None, accept_changes=False, now=NOW, without_removed=without_removed)


def resume(run: Run, step: int) -> Run:
    """What the ranks of a start that resumes at `step` go on with."""
    return agree_on_removals(run, claim(run.store, owner=Owner.for_this_process(0.0)), step, SingleRank())[0]


def test_a_run_that_is_made_afterwards_reads_its_state_for_ever(folder: Path) -> None:
    plain = open_run(new_run(folder, "plain"))
    assert b"removals" not in plain.store.get(RECORD_FILE)
    first = remove(folder, "1", "heldout:0")
    run = open_run(new_run(folder, "run"))
    assert run.record.inputs.removals == {"text": first}
    assert run.record.fingerprint != plain.record.fingerprint
    assert run.record.inputs.corpora == plain.record.inputs.corpora
    assert states_in(again(run)) == {first}
    assert states_in(resume(again(run), 0)) == {first}
    assert list(run.store.list(REMOVALS_PREFIX)) == []
    remove(folder, "2")
    assert states_in(open_run(run.uri)) == {first}


def test_a_run_whose_corpus_lost_documents_goes_on_only_when_told(folder: Path) -> None:
    run = open_run(new_run(folder, "run"))
    first = remove(folder, "1", "5", "heldout:0")
    before = {entry.key for entry in run.store.list()}
    with pytest.raises(RunChanged) as caught:
        again(run)
    assert "corpus.sources.text: 3 " in caught.value.problem
    assert "--without-removed" in caught.value.remedy
    assert {entry.key for entry in run.store.list()} == before
    with pytest.raises(RunChanged):  # which is about other changes
        reconciled(open_run(run.uri), recipe=None, accept_changes=True, now=NOW)
    told = again(run, without_removed=True)
    assert states_in(told) == {first}
    with pytest.raises(RunChanged):  # nothing was read yet: the next start is to be told again
        again(run)
    resume(told, 5)
    settled = open_run(run.uri)
    assert [settled.removal_history.states_at(step) for step in (4, 5, 6)] == [
        {},
        {"text": first},
        {"text": first},
    ]
    assert states_in(again(run)) == {first}
    second = remove(folder, "7")
    with pytest.raises(RunChanged) as caught:
        again(run)
    assert "corpus.sources.text: 1 " in caught.value.problem
    resume(again(run, without_removed=True), 9)
    found = open_run(run.uri).removal_history
    assert [found.states_at(step).get("text", "") for step in (4, 5, 8, 9)] == ["", first, first, second]
    assert settled.record == open_run(run.uri).record


def test_removals_that_were_lost_are_noticed(folder: Path) -> None:
    run = open_run(new_run(folder, "run"))
    first = remove(folder, "1")
    resume(again(run, without_removed=True), 3)
    shutil.rmtree(folder / "corpus/removals")
    for told in (False, True):
        with pytest.raises(CorpusError) as caught:
            again(run, without_removed=told)
        assert first[:12] in caught.value.problem


@pytest.fixture(scope="module")
def untrained(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(new_run(inputs, str(tmp_path_factory.mktemp("untrained") / "run")))


@settings(deadline=None, max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_every_step_has_the_state_that_was_read(
    untrained: Run, tmp_path_factory: pytest.TempPathFactory, draw: random.Random, starts: int
) -> None:
    """Starts at any step that was reached, with what was removed so far; held to a list of what each step read."""
    store, most = open_store(tmp_path_factory.mktemp("run")), 12
    read: list[str] = [""] * most
    seen, newest, reached = [list(read)], 0, 0
    for _ in range(starts):
        newest += draw.randrange(2)
        step = draw.randint(0, reached)
        wanted: CorpusStates = {"text": f"state {newest}"} if newest else {}
        attempt = claim(store, owner=Owner.for_this_process(0.0))
        run = replace(untrained, store=store, wanted=wanted)
        settled, added = agree_on_removals(run, attempt, step, SingleRank())
        read[step:] = [wanted.get("text", "")] * (most - step)
        assert settled.removals == wanted
        assert (added is not None) == (seen[-1][step] != read[step])
        seen.append(list(read))
        reached = max(reached, draw.randint(step, most - 1))
        history = RemovalHistory({}, settled.left_out)
        assert [history.states_at(number).get("text", "") for number in range(most)] == read
    for number_of_start, then in enumerate(seen):
        known = [history.states_at(number, number_of_start).get("text", "") for number in range(most)]
        assert known == then


@pytest.mark.parametrize("seed", range(4))
def test_records_may_be_written_again_but_not_others_in_their_place(tmp_path: Path, seed: int) -> None:
    """As by a fork that was interrupted between two of them."""
    draw, store = random.Random(seed), open_store(tmp_path)
    records = [RemovalRecord(step=step, attempt=1, states={"text": str(step)}) for step in range(draw.randint(2, 5))]
    for count in [*sorted(draw.choices(range(1, len(records) + 1), k=3)), len(records)]:
        for number, record in enumerate(records[:count], 1):
            write_removals(store, number, record)
    assert read_removals(store) == tuple(records)
    with pytest.raises(DamagedCheckpoint):
        write_removals(store, draw.randint(1, len(records)), records[0].model_copy(update={"step": 99}))
    assert read_removals(store) == tuple(records)


def test_a_damaged_record_is_named(folder: Path) -> None:
    run = open_run(new_run(folder, "run"))
    for step, name in ((3, "1"), (6, "2"), (7, "3")):
        remove(folder, name)
        resume(again(run, without_removed=True), step)
    keys = [entry.key for entry in run.store.list(REMOVALS_PREFIX)]
    data, rng = run.store.get(keys[1]), random.Random(2)
    for _ in range(20):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        run.store.put(keys[1], bytes(changed))
        with pytest.raises(DamagedCheckpoint) as caught:
            open_run(run.uri)
        assert keys[1] in caught.value.problem
    run.store.delete(keys[1])
    with pytest.raises(DamagedCheckpoint) as caught:
        open_run(run.uri)
    assert keys[1] in caught.value.problem
