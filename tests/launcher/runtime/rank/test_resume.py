"""Where a group resumes when newer commits are damaged and the memory of the nodes has a state, too: whatever came
before, it can save its next step."""

import random
from pathlib import Path
from typing import Any

import pytest

from checkpoints.attempt import claim
from checkpoints.commit import CommittedSave
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointManifest, CheckpointName, LineageSegment, StoredRange
from checkpoints.listing import list_committed
from checkpoints.memory_slots import CommonDescription, SlotDescription
from checkpoints.save import Saver
from checkpoints.verify import find_newest_good
from launcher.runtime.rank.resume import find_resume_point, missing_records
from launcher.runtime.run.packing import pack_once
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.segments import METRICS, segment_key
from tests.support.faults.ranks import damage
from tests.support.ranks.checkpointers import Silent
from tests.support.ranks.checkpointing import SHAPES, commit_steps, cut, random_state, save
from tests.support.runs.small_runs import new_run


@pytest.mark.parametrize("seed", range(8))
def test_records_of_a_copy_that_are_in_the_store_are_not_written_again(inputs: Path, tmp_path: Path, seed: int) -> None:
    """Whether their segments were packed since or not."""
    run, draw = open_run(new_run(inputs, str(tmp_path / "run"))), random.Random(seed)
    counts = [draw.randint(1, 3) for _ in range(draw.randint(20, 40))]
    lines = [f'{{"kind": "step", "step": {step}}}\n' for step in range(sum(counts))]
    for number in range(len(counts)):
        begins = sum(counts[:number])
        data = "".join(lines[begins : begins + counts[number]]).encode()
        run.store.put(segment_key(METRICS, 1, number), data)
    copied = draw.randrange(len(counts))
    unsaved = [f'{{"kind": "step", "step": {len(lines) + more}}}\n' for more in range(draw.randrange(3))]
    common = CommonDescription(
        shapes={},
        own_kinds={},
        memory={},
        state={},
        lineage=(),
        segments=copied,
        records=(*lines[sum(counts[:copied]) :], *unsaved),
    )
    while draw.random() < 0.8 and pack_once(run.store, 1, ended=True, most_segments=draw.randint(2, 9)):
        pass
    assert missing_records(run, 1, common) == unsaved


class Held:
    """The memory of the only node, with the sets of one state or of none."""

    shares, ranks = False, 1

    def __init__(self, description: SlotDescription | None) -> None:
        self.description = description

    def list_sets(self) -> list[Any]:
        return [self.description.model_dump_json()] if self.description else []

    def describe(self, held: Any) -> SlotDescription:
        return SlotDescription.model_validate_json(held)

    def open_set(self, held: Any) -> Any:
        return lambda start, stop: bytearray(stop - start)

    def note_completed_set(self, *_: object) -> None: ...
    def drop_all_sets(self) -> None: ...


def copy_after(run: Run, attempt: int, resumed: CheckpointManifest | None, step: int) -> SlotDescription:
    """The set of the only rank after `step` steps, as it would lie in memory."""
    pieces, offset = [], 0
    for fragment in cut(random_state(step), (), 0):
        offsets = {}
        for kind, tensor in fragment.tensors.items():
            offsets[kind], offset = offset, offset + 4 * tensor.numel()
        stop = fragment.start + len(next(iter(fragment.tensors.values())))
        pieces.append(StoredRange(name=fragment.name, start=fragment.start, stop=stop, file=0, offsets=offsets))
    past, begun = (resumed.lineage, resumed.step) if resumed else ((), 0)
    lineage = (*past, LineageSegment(attempt=attempt, start=begun, stop=step))
    common = CommonDescription(shapes=SHAPES, own_kinds={}, memory={}, state={}, lineage=lineage)
    return SlotDescription(
        recipe=run.record.fingerprint,
        attempt=attempt,
        step=step,
        rank=0,
        world=1,
        pieces=tuple(pieces),
        common=common,
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_state_in_memory_after_damaged_commits_can_be_saved_at_every_later_step(
    inputs: Path, tmp_path: Path, seed: int
) -> None:
    run, draw = open_run(new_run(inputs, str(tmp_path / "run"))), random.Random(seed)
    resumed, begun, damaged = None, 0, set[CheckpointName]()
    for _ in range(draw.randint(1, 3)):
        attempt = claim(run.store)
        steps = sorted(draw.sample(range(begun + 1, begun + 9), draw.randint(1, 3)))
        commit_steps(run.store, attempt, *steps, resumed=resumed)
        for _ in range(draw.randrange(len(set(list_committed(run.store)) - damaged))):
            damage(run.store, draw, damaged)
        good = find_newest_good(run.store, SingleRank())
        assert good is not None
        resumed, begun = good.manifest, good.manifest.step
    dying = claim(run.store)
    copied = begun + draw.randint(1, 4)
    memory = Held(copy_after(run, dying.number, resumed, copied))
    point = find_resume_point(run, SingleRank(), Silent(), memory)
    assert point is not None
    assert (point.memory is not None, point.manifest.step, point.stored) == (True, copied, begun)
    newest = claim(run.store)
    saver = Saver(run.store, newest, SingleRank(), resumed=point.manifest, stored=point.stored)
    step = copied + draw.randrange(3)
    assert isinstance(save(saver, step, step), CommittedSave)
    saver.close()
    assert list_committed(run.store)[0] == CheckpointName(newest.number, step)
