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

from checkpoints.layout import LineageSegment, element_count
from checkpoints.memory import MemoryReader, MemoryWriter, SetOffer, manifest_from_sets, newest_sets
from checkpoints.memory_slots import HEADER_BYTES, CommonDescription, Slot
from tests.support.ranks.checkpointing import SHAPES, cut, random_state

ELEMENTS = sum(element_count(shape) for shape in SHAPES.values())


class Held:
    """A keeper in the same process: the slots of each rank, with the newest ones last."""

    def __init__(self, *, shares: bool = False) -> None:
        self.shares, self.ranks = shares, 1
        self.slots: dict[int, list[Slot]] = {}
        self._known: dict[int, Sequence[Slot]] = {}

    def note_completed_set(self, rank: int, count: int, slots: Sequence[Slot]) -> None:
        if self._known.get(rank) is not slots:
            self._known[rank] = slots
            self.slots.setdefault(rank, []).extend(Slot.open_from_process(os.getpid(), one.descriptor) for one in slots)

    def drop_all_sets(self) -> None:
        for slot in (slot for held in self.slots.values() for slot in held):
            slot.mark_sets_dropped()

    def offers(self) -> list[SetOffer]:
        slots = [slot for held in self.slots.values() for slot in held]
        return [SetOffer(told, slot) for slot in slots if (told := slot.read_description()) is not None]


def common(step: int) -> CommonDescription:
    lineage = (LineageSegment(attempt=1, start=0, stop=step),)
    return CommonDescription(shapes=SHAPES, own_kinds={}, memory={}, state={"step": step}, lineage=lineage)


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
    found = newest_sets(keeper.offers(), "r")
    if not expected:
        assert found is None
        return
    assert found is not None
    sets = [offer.description for offer in found]
    manifest = manifest_from_sets(sets)
    assert (manifest.step, manifest.world_size, manifest.state) == (expected, world, {"step": expected})
    views = {rank: memoryview(offer.place.data) for rank, offer in enumerate(found)}
    bodies = {rank: view[HEADER_BYTES:] for rank, view in views.items()}
    reader = MemoryReader(manifest, {r: lambda a, b, v=v: v[a:b] for r, v in bodies.items()})  # type: ignore[misc]
    for name, kinds in random_state(expected).items():
        for kind, tensor in kinds.items():
            size = tensor.numel()
            start = data.draw(st.integers(0, size))
            stop = data.draw(st.integers(start, size))
            assert torch.equal(reader.read(name, kind, start, stop), tensor.flatten()[start:stop])


def test_sets_of_another_recipe_are_passed_over() -> None:
    keeper = Held()
    write(keeper, 3, 2, [0, 1], writers_of(keeper, 2, recipe="other"))
    assert newest_sets(keeper.offers(), "r") is None


def test_no_rank_may_be_missing_and_worlds_do_not_mix() -> None:
    keeper, other = Held(), Held()
    write(keeper, 3, 3, [0, 1], writers_of(keeper, 3))
    write(other, 3, 2, [1], writers_of(other, 2))
    assert newest_sets([*keeper.offers(), *other.offers()], "r") is None


COUNT = 300_000
WRITER = f"""
import os, torch
from checkpoints.memory_slots import HEADER_BYTES, SlotDescription, Slot
slots = [Slot.create({4 * COUNT}, 100) for _ in range(2)]
print(*(slot.descriptor for slot in slots), flush=True)
for step in range(1_000_000):
    slot = slots[step % 2]
    slot.begin_set()
    torch.frombuffer(slot.data, dtype=torch.float32, offset=HEADER_BYTES, count={COUNT}).fill_(step % 1000)
    told = SlotDescription(recipe="r", attempt=1, step=step, rank=0, world=1, pieces=())
    slot.complete_set(step, {4 * COUNT}, told.model_dump_json().encode())
    if step == 1:
        print("both", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_is_killed_while_it_writes_leaves_the_set_before(seed: int) -> None:
    """A real process, killed at a random moment. The slots outlive it, and what is whole is what it wrote."""
    with subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        slots = [Slot.open_from_process(process.pid, int(part)) for part in process.stdout.readline().split()]
        process.stdout.readline()  # it has completed two sets
        threading.Event().wait(random.Random(seed).random() / 20)
        process.kill()
    whole = [slot for slot in slots if slot.read_description() is not None]
    assert whole, "one of two is always complete"
    for slot in whole:
        body = torch.frombuffer(slot.data, dtype=torch.float32, offset=HEADER_BYTES, count=COUNT)
        assert bool((body == float((slot.seal - 1) % 1000)).all())


def test_a_slot_that_is_closed_raises_the_same_whether_it_is_read_or_written() -> None:
    """The keeper of a rank that has ended marks its slots as copied when the partner answers, and expects that."""
    slot = Slot.create(64, 64)
    slot.mark_copy_awaited(True)
    assert slot.awaits_copy
    slot.close()
    for use in (
        lambda: slot.awaits_copy,
        lambda: slot.mark_copy_awaited(False),
        slot.mark_copy_refused,
        slot.begin_set,
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_nothing_is_left_of_a_slot_that_nobody_has_open() -> None:
    slot = Slot.create(1 << 20, 100)
    path = f"/proc/{os.getpid()}/fd/{slot.descriptor}"
    assert os.readlink(path).startswith("/memfd:")
    slot.close()
    with pytest.raises(OSError, match=r"."):
        Slot.open_from_process(os.getpid(), slot.descriptor)


class Partner:
    """What one keeper has of the sets of a rank on another node, and what it is doing. A turn is one answer of the
    rank's node."""

    def __init__(self, there: list[Slot]) -> None:
        self._there = there
        self._source: Slot | None = None
        self._identity = (0, b"")
        self._at = 0
        self.copies: list[Slot] = []
        self._target: Slot | None = None

    def turn(self) -> None:
        if self._source is None:
            newest = max(self._there, key=lambda slot: slot.seal)
            if newest.awaits_copy and newest.seal:
                self._source, self._identity, self._at = newest, newest.identity, 8
                self._target = self.copies.pop() if len(self.copies) == 2 else Slot.create(newest.size, 0)
                self._target.begin_set()
            return
        assert self._target is not None
        stop = min(self._at + 256, self._source.used_bytes)
        if self._at < stop:
            self._target.data[self._at : stop] = self._source.data[self._at : stop]
            self._at = stop
            return
        if self._source.identity == self._identity:
            self._target.mark_copy_awaited(False)
            self._target.complete_copied_set(self._identity[0])
            self.copies.insert(0, self._target)
            self._source.mark_copy_awaited(False)
        self._source = None


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 4), st.randoms(use_true_random=False))
def test_whichever_node_is_lost_at_any_moment_one_step_is_left_of_all(world: int, draws: random.Random) -> None:
    """One rank a node. Keepers copy as slowly as they may."""
    keeper = Held(shares=True)
    writers = writers_of(keeper, world)
    write(keeper, 1, world, range(world), writers)
    partners = [Partner(keeper.slots[rank]) for rank in range(world)]
    while not all(partner.copies for partner in partners):
        for partner in partners:
            partner.turn()
    made = 1
    for step in range(2, 2 + draws.randrange(60)):
        for partner in draws.sample(partners, draws.randint(0, world)):
            for _ in range(draws.randint(1, 8)):
                partner.turn()
        if all(writer.is_ready for writer in writers):
            wrote = draws.sample(range(world), draws.randint(0, world))
            write(keeper, step, world, wrote, writers)
            if len(wrote) < world:  # the others are killed before they write, or while they do
                for rank in draws.sample(range(world), draws.randint(0, world)):
                    if rank not in wrote:
                        min(keeper.slots[rank], key=lambda slot: slot.seal).begin_set()
                break
            made = step
    lost = draws.randrange(world)  # its sets and its keeper's copies, which are those of the rank before
    slots = [slot for rank, held in keeper.slots.items() if rank != lost for slot in held]
    slots += [slot for rank, each in enumerate(partners) if (rank + 1) % world != lost for slot in each.copies]
    found = newest_sets([SetOffer(told, slot) for slot in slots if (told := slot.read_description())], "r")
    assert found is not None
    assert 1 <= found[0].description.step <= made


def test_no_set_is_begun_before_the_newest_is_copied() -> None:
    keeper = Held(shares=True)
    (writer,) = writers_of(keeper, 1)
    for step in (1, 2):
        assert writer.is_ready
        write(keeper, step, 1, [0], [writer])
        assert not writer.is_ready
        max(keeper.slots[0], key=lambda slot: slot.seal).mark_copy_awaited(False)
    assert writer.is_ready
