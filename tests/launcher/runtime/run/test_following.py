"""The committed lineage's records as they come: each once and in order, whatever is repeated, rewound or packed."""

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.attempt import Attempt, Owner, claim
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointManifest, CheckpointName, LineageSegment
from checkpoints.listing import Rewind, list_committed, read_manifest, record_rewind
from checkpoints.save import Saver
from data_service.store.base import Store
from data_service.store.local import LocalStore
from encoder_core.train.zero_state import Fragment
from launcher.errors import RunError
from launcher.runtime.run.following import EventFollower, LineageFollower
from launcher.runtime.run.log import encode_line, record_operator_event
from launcher.runtime.run.packing import pack_once
from launcher.runtime.run.segments import segment_key


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(tmp_path)


class Writer:
    """An attempt that resumes from a checkpoint, records steps, each segment holding two records, and commits."""

    def __init__(
        self,
        store: Store,
        resumed: CheckpointName | None = None,
        memory: CheckpointManifest | None = None,
        stored: int | None = None,
    ) -> None:
        self.store = store
        self.attempt = claim(store, owner=Owner.for_this_process(0.0))
        manifest = read_manifest(store, resumed) if resumed else memory
        self.saver = Saver(store, self.attempt, SingleRank(), resumed=manifest, stored=stored)
        self.step = manifest.step if manifest else 0
        self.lines: list[str] = []
        self.segments = 0

    def train(self, stop: int) -> "Writer":
        for step in range(self.step, stop):
            self.lines.append(encode_line({"kind": "step", "step": step, "by": self.attempt.number}))
            if (step + 1) % 3 == 0:
                self.lines.append(encode_line({"kind": "evaluation", "step": step + 1, "by": self.attempt.number}))
        self.step = stop
        return self

    def flush(self) -> "Writer":
        while self.lines:
            key = segment_key("metrics", self.attempt.number, self.segments)
            self.store.put(key, "".join(self.lines[:2]).encode())
            self.lines, self.segments = self.lines[2:], self.segments + 1
        return self

    def commit(self) -> CheckpointName:
        tensors = {kind: torch.zeros(4) for kind in ("master", "exp_avg", "exp_avg_sq")}
        self.saver.begin(self.step, [Fragment("w", 0, tensors)], {"w": (4,)}, {"step": self.step})
        self.saver.wait_for_all(lambda sent: None)
        self.saver.commit()
        return CheckpointName(self.attempt.number, self.step)


def told(follower: LineageFollower, most: int = 4096) -> tuple[int | None, list[tuple[str, int, int]]]:
    news = follower.read_new(most)
    assert news.damage == ()
    return news.superseded_from, [(record["kind"][:4], record["step"], record["by"]) for record in news.records]


def test_nothing_is_returned_before_it_is_committed_and_nothing_twice(store: Store) -> None:
    follower = LineageFollower(store)
    writer = Writer(store).train(5).flush()
    assert told(follower) == (None, [])
    writer.commit()
    steps = [("step", 0, 1), ("step", 1, 1), ("step", 2, 1), ("eval", 3, 1), ("step", 3, 1), ("step", 4, 1)]
    assert told(follower) == (None, steps)
    assert told(follower) == (None, [])
    writer.train(6).flush()
    assert told(follower) == (None, [])
    writer.commit()
    assert told(follower) == (None, [("step", 5, 1), ("eval", 6, 1)])


def test_what_is_written_after_the_commit_comes_later(store: Store) -> None:
    follower, writer = LineageFollower(store), Writer(store).train(2).flush().train(4)
    writer.commit()
    assert told(follower) == (None, [("step", 0, 1), ("step", 1, 1)])
    writer.flush()
    assert told(follower) == (None, [("step", 2, 1), ("eval", 3, 1), ("step", 3, 1)])


def test_records_that_were_lost_hold_up_nothing(store: Store) -> None:
    first = Writer(store).train(2).flush().train(4)
    mark = first.commit()  # and dies
    Writer(store, mark).train(5).flush().commit()
    assert told(LineageFollower(store)) == (None, [("step", 0, 1), ("step", 1, 1), ("step", 4, 2)])


def test_damage_is_told_and_passed_over(store: Store) -> None:
    writer = Writer(store).train(4).flush()
    key = segment_key("metrics", 1, 1)
    store.put(key, b'{"kind": "st\n' + store.get(key))
    writer.commit()
    news = LineageFollower(store).read_new()
    assert [record["step"] for record in news.records if record["kind"] == "step"] == [0, 1, 2, 3]
    (damage,) = news.damage
    assert "00000001.jsonl, line 1: not JSON" in damage


def test_events_come_once_and_an_idle_look_lists_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record_operator_event(store, "stop_requested", 1.0, by="somebody", of=0)
    everything, later = EventFollower(store, past=True), EventFollower(store)
    for number in range(2):
        attempt = claim(store, owner=Owner.for_this_process(0.0)).number
        events = "".join(
            json.dumps({"kind": kind, "time": 10.0 * attempt + number, "attempt": attempt}) + "\n"
            for kind in ("start", "commit")
        )
        store.put(segment_key("events", attempt, 0), events.encode())
    assert [event["kind"] for event in everything.read_new()] == ["stop_requested", *("start", "commit") * 2]
    assert [event["attempt"] for event in later.read_new()] == [1, 1, 2, 2]
    monkeypatch.setattr(type(store), "list", None)
    assert everything.read_new() == later.read_new() == []


def test_an_event_of_a_newer_version_is_told_behind_what_was_read_before(store: Store) -> None:
    follower = EventFollower(store, past=True)
    attempt = claim(store, owner=Owner.for_this_process(0.0)).number
    for segment, kind in enumerate(("start", "commit", "resume")):
        event = {"kind": kind, "time": float(segment), "attempt": attempt} | ({"format": 2} if kind == "commit" else {})
        store.put(segment_key("events", attempt, segment), encode_line(event).encode())
    assert [event["kind"] for event in follower.read_new()] == ["start"]
    with pytest.raises(RunError, match=r"00000001\.jsonl"):
        follower.read_new()
    assert [event["kind"] for event in follower.read_new()] == ["resume"]
    assert follower.read_new() == []


@pytest.mark.parametrize("seed", range(12))
def test_records_that_a_successor_restored_from_memory_come_once(store: Store, seed: int) -> None:
    """What the dead attempt had not written yet is in its successor's segments, with steps before its beginning; also
    the evaluation before the first step. Whoever looks between gets the rest, and again after the run went back."""
    draw = random.Random(seed)
    first = Writer(store)
    first.lines.append(encode_line({"kind": "evaluation", "step": 0, "by": 1}))
    first.train(draw.randint(1, 5)).flush()
    mark = first.commit()
    died = first.step + draw.randint(1, 7)
    first.train(died)
    written = draw.randrange(len(first.lines) + 1)
    unwritten, first.lines = first.lines[written:], first.lines[:written]
    first.flush()
    memory = read_manifest(store, mark).model_copy(
        update={"step": died, "lineage": (LineageSegment(attempt=1, start=0, stop=died),), "files": ()}
    )
    second = Writer(store, memory=memory, stored=mark.step)
    second.lines += unwritten
    follower, kept = LineageFollower(store), dict[tuple[str, int], int]()
    for _ in range(draw.randint(1, 3)):
        second.train(second.step + draw.randint(1, 4)).flush()
        newest = second.commit()
        if draw.random() < 0.7:
            apply(kept, *told(follower, draw.randint(1, 9)))
    if draw.random() < 0.5:
        Writer(store, newest).train(newest.step + 4).flush().commit()
    while (found := told(follower, 5)) != (None, []):
        apply(kept, *found)
    reached = read_manifest(store, list_committed(store)[0]).step
    expected = {("step", step) for step in range(reached)}
    expected |= {("eval", step) for step in range(0, reached + 1, 3)}
    assert kept.keys() == expected


def apply(kept: dict[tuple[str, int], int], superseded: int | None, records: list[tuple[str, int, int]]) -> None:
    """As a tracker does."""
    if superseded is not None:
        for kind, step in list(kept):
            if step >= superseded:
                del kept[kind, step]
    for kind, step, by in records:
        assert (kind, step) not in kept
        kept[kind, step] = by


@pytest.mark.heavy
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whenever_one_looks_what_was_returned_is_the_committed_lineage(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("run"))
    writer, marks, follower = Writer(store), [], LineageFollower(store)
    kept: dict[tuple[str, int], int] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        writer.train(writer.step + data.draw(st.integers(1, 5))).flush()
        if data.draw(st.booleans()):
            marks.append(writer.commit())
        act = data.draw(st.sampled_from(["go on", "die", "go back", "look", "look anew", "pack"]))
        if act.startswith("look"):
            follower = LineageFollower(store, follower.cursor) if act == "look anew" else follower
            apply(kept, *told(follower, data.draw(st.integers(1, 9))))
        elif act == "pack":
            pack_once(store, data.draw(st.integers(1, writer.attempt.number)), ended=True)
        elif act == "die":
            writer = Writer(store, marks[-1] if marks else None)
        elif act == "go back" and len(marks) > 1:
            marks = marks[: data.draw(st.integers(1, len(marks) - 1))]
            back = Rewind(attempt=writer.attempt.number, to=marks[-1], began=0, reached=0, cause="", skips=())
            record_rewind(store, back, Attempt(store, writer.attempt.number))
            writer = Writer(store, marks[-1])
    while (found := told(follower, 5)) != (None, []):
        apply(kept, *found)
    lineage = read_manifest(store, marks[-1]).lineage if marks else ()
    expected = {("step", step): part.attempt for part in lineage for step in range(part.start, part.stop)}
    expected |= {
        ("eval", step): part.attempt
        for part in lineage
        for step in range(part.start + 1, part.stop + 1)
        if step % 3 == 0
    }
    assert kept == expected
