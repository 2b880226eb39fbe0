"""States in memory: what was written is read, by any number of ranks; a set that is not whole is never taken."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.layout import LineageSegment, elements
from checkpoints.memory import MemoryReader, MemoryWriter, Offer, manifest_of, newest_complete
from checkpoints.memory_slots import HEAD, Common, Slot
from tests.support.ranks.checkpointing import SHAPES, cut, random_state

ELEMENTS = sum(elements(shape) for shape in SHAPES.values())


class Held:
    """A keeper in the same process: the slots of each rank, with the newest ones last."""

    def __init__(self) -> None:
        self.slots: dict[int, list[Slot]] = {}
        self.completed_sets: list[tuple[int, int]] = []

    def hold(self, rank: int, pid: int, descriptors: Sequence[int]) -> None:
        self.slots.setdefault(rank, []).extend(Slot.of_process(pid, one) for one in descriptors)

    def completed(self, rank: int, count: int) -> None:
        self.completed_sets.append((rank, count))

    def offers(self) -> list[Offer]:
        slots = [slot for held in self.slots.values() for slot in held]
        return [Offer(told, slot) for slot in slots if (told := slot.described()) is not None]


def common(step: int) -> Common:
    lineage = (LineageSegment(attempt=1, start=0, stop=step),)
    return Common(shapes=SHAPES, own_kinds={}, memory={}, state={"step": step}, lineage=lineage)


def write(keeper: Held, step: int, world: int, ranks: Sequence[int], writers: list[MemoryWriter]) -> None:
    for rank in ranks:
        draws = random.Random(step)
        cuts = sorted(draws.randrange(ELEMENTS) for _ in range(world - 1))
        writers[rank].write(step, cut(random_state(step), cuts, rank), common(step) if rank == 0 else None)


def writers_of(keeper: Held, world: int, recipe: str = "r") -> list[MemoryWriter]:
    return [MemoryWriter(keeper, recipe=recipe, attempt=1, rank=rank, world=world) for rank in range(world)]


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_the_newest_step_that_all_ranks_wrote_is_read_bit_for_bit(data: st.DataObject) -> None:
    """Ranks stop at random steps, as if killed; two sets of each stay."""
    world, keeper = data.draw(st.integers(1, 4)), Held()
    writers = writers_of(keeper, world)
    last = data.draw(st.integers(1, 5))
    lost = data.draw(st.sets(st.integers(0, world - 1)))
    for step in range(1, last + 1):
        write(keeper, step, world, [r for r in range(world) if step < last or r not in lost], writers)
    expected = last if not lost else last - 1
    found = newest_complete(keeper.offers(), "r")
    if not expected:
        assert found is None
        return
    assert found is not None
    sets = [offer.description for offer in found]
    manifest = manifest_of(sets)
    assert (manifest.step, manifest.world_size, manifest.state) == (expected, world, {"step": expected})
    views = {rank: memoryview(offer.place.data) for rank, offer in enumerate(found)}
    reader = MemoryReader(manifest, {r: lambda a, b, v=v: v[HEAD + a : HEAD + b] for r, v in views.items()})  # type: ignore[misc]
    for name, kinds in random_state(expected).items():
        for kind, tensor in kinds.items():
            size = tensor.numel()
            start = data.draw(st.integers(0, size))
            stop = data.draw(st.integers(start, size))
            assert torch.equal(reader.read(name, kind, start, stop), tensor.flatten()[start:stop])


def test_sets_of_another_recipe_are_passed_over() -> None:
    keeper = Held()
    write(keeper, 3, 2, [0, 1], writers_of(keeper, 2, recipe="other"))
    assert newest_complete(keeper.offers(), "r") is None


def test_no_rank_may_be_missing_and_worlds_do_not_mix() -> None:
    keeper, other = Held(), Held()
    write(keeper, 3, 3, [0, 1], writers_of(keeper, 3))
    write(other, 3, 2, [1], writers_of(other, 2))
    assert newest_complete([*keeper.offers(), *other.offers()], "r") is None


COUNT = 300_000
WRITER = f"""
import os, torch
from checkpoints.memory_slots import HEAD, Description, Slot
slots = [Slot.make({4 * COUNT}, 100) for _ in range(2)]
print(*(slot.descriptor for slot in slots), flush=True)
for step in range(1_000_000):
    slot = slots[step % 2]
    slot.open()
    torch.frombuffer(slot.data, dtype=torch.float32, offset=HEAD, count={COUNT}).fill_(step % 1000)
    told = Description(recipe="r", attempt=1, step=step, rank=0, world=1, pieces=())
    slot.close_set(step, {4 * COUNT}, told.model_dump_json().encode())
    if step == 1:
        print("both", flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_is_killed_while_it_writes_leaves_the_set_before(seed: int) -> None:
    """A real process, killed at a random moment. The slots outlive it, and what is whole is what it wrote."""
    with subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        slots = [Slot.of_process(process.pid, int(part)) for part in process.stdout.readline().split()]
        process.stdout.readline()  # it has completed two sets
        threading.Event().wait(random.Random(seed).random() / 20)
        process.kill()
    whole = [slot for slot in slots if slot.described() is not None]
    assert whole, "one of two is always complete"
    for slot in whole:
        body = torch.frombuffer(slot.data, dtype=torch.float32, offset=HEAD, count=COUNT)
        assert bool((body == float((slot.seal - 1) % 1000)).all())


def test_nothing_is_left_of_a_slot_that_nobody_has_open() -> None:
    slot = Slot.make(1 << 20, 100)
    path = f"/proc/{os.getpid()}/fd/{slot.descriptor}"
    assert os.readlink(path).startswith("/memfd:")
    slot.close()
    with pytest.raises(OSError, match=r"."):
        Slot.of_process(os.getpid(), slot.descriptor)


def test_a_slot_that_is_copied_is_not_overwritten() -> None:
    keeper = Held()
    (writer,) = writers_of(keeper, 1)
    for step in (1, 2):
        write(keeper, step, 1, [0], [writer])
    older, newer = sorted(keeper.slots[0], key=lambda slot: slot.seal)
    newer.mark_busy(True)
    assert writer.ready
    older.mark_busy(True)
    assert not writer.ready
    older.mark_busy(False)
    assert writer.ready
