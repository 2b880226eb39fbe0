"""Keepers of two nodes: sets are copied to the other node, one behind the other, until its keeper dies."""

import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from checkpoints.layout import LineageSegment, element_count
from checkpoints.memory import MemoryReader, MemoryWriter, SetOffer, manifest_from_sets, newest_sets
from checkpoints.memory_slots import CommonDescription
from launcher.runtime.cluster.memory_keeper import StateKeepersClient, ensure_keepers
from tests.support.ranks.checkpointing import SHAPES, cut, random_state

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(300)]

ELEMENTS = sum(element_count(shape) for shape in SHAPES.values())
SOON_S = 40.0  # less than the time after which a rank goes on without its partner


@pytest.fixture
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Ids of two nodes; this process is on the first."""
    room = {"num_cpus": 1, "object_store_memory": 150_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"temp_dir": str(tmp_path_factory.mktemp("r")), **room})
    try:
        other = cluster.add_node(**room)
        ray.init(address=cluster.address)
        yield [ray.get_runtime_context().get_node_id(), other.node_id]
    finally:
        ray.shutdown()
        cluster.shutdown()


def await_true(true: Callable[[], Any]) -> None:
    tick, deadline = threading.Event(), time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline
        tick.wait(0.01)  # there is nothing to wait on: keepers tell nobody when a copy is made


def write(writers: list[MemoryWriter], step: int) -> None:
    """Write the set of every rank as soon as all can, as ranks agree."""
    await_true(lambda: all(writer.is_ready for writer in writers))
    for rank, writer in enumerate(writers):
        writer.write(step, cut(random_state(step), [ELEMENTS // 3], rank), common(step) if rank == 0 else None)


def write_all(writer: MemoryWriter, step: int, attempt: int = 1) -> None:
    """Write the set of the only rank."""
    writer.write(step, cut(random_state(step), [], 0), common(step, attempt))


def common(step: int, attempt: int = 1) -> CommonDescription:
    lineage = (LineageSegment(attempt=attempt, start=0, stop=step),)
    return CommonDescription(shapes=SHAPES, own_kinds={}, memory={}, state={"step": step}, lineage=lineage)


def whole_on(node: str, memory: StateKeepersClient) -> list[SetOffer] | None:
    """The sets of the newest step that the keeper of one node holds whole; None if there is none."""
    offers = [SetOffer(memory.describe(held), held) for held in memory.list_sets() if held["node"] == node]
    return newest_sets(offers, "r")


def newest_on(node: str, memory: StateKeepersClient) -> int | None:
    """The step of these sets."""
    found = whole_on(node, memory)
    return found[0].description.step if found is not None else None


def left_on(node: str, memory: StateKeepersClient) -> tuple[int, MemoryReader]:
    """The step of these sets, and a reader of them."""
    found = whole_on(node, memory)
    assert found is not None
    parts = {rank: memory.open_set(offer.place) for rank, offer in enumerate(found)}
    told = [offer.description for offer in found]
    return told[0].step, MemoryReader(manifest_from_sets(told), parts)


def test_each_node_has_all_sets_of_the_newest_step_or_the_one_before(nodes: list[str]) -> None:
    keepers = ensure_keepers({}, nodes)
    memories = [StateKeepersClient(keepers, nodes, rank, attempt=1, remembers=True) for rank in range(2)]
    writers = [MemoryWriter(memory, recipe="r", attempt=1, rank=rank, world=2) for rank, memory in enumerate(memories)]
    for step in range(1, 30):
        write(writers, step)
        if step > 1:
            for node in nodes:
                found, reader = left_on(node, memories[0])
                assert found >= step - 1
                for name, kinds in random_state(found).items():
                    for kind, tensor in kinds.items():
                        assert reader.read(name, kind, 0, tensor.numel()).equal(tensor.flatten())
    ray.kill(keepers[nodes[1]])
    for step in range(30, 34):
        write(writers[:1], step)


def test_slots_of_a_later_group_are_told_from_those_before(nodes: list[str]) -> None:
    """A process that stays makes new slots, which may have the descriptors of those that it has closed. A keeper that
    Ray has started again holds what it is told next."""
    keepers = ensure_keepers({}, nodes[:1])
    memory = StateKeepersClient(keepers, nodes[:1], 0, attempt=1, remembers=True)
    step = 0
    for attempt in range(1, 6):
        writer = MemoryWriter(memory, recipe="r", attempt=attempt, rank=0, world=1)
        for _ in range(2):
            step += 1
            write_all(writer, step, attempt)
            await_true(lambda: newest_on(nodes[0], memory) == step)  # noqa: B023
        writer.close()
    ray.kill(keepers[nodes[0]], no_restart=False)
    writer = MemoryWriter(memory, recipe="r", attempt=6, rank=0, world=1)

    def told_again() -> bool:
        nonlocal step
        step += 1
        write_all(writer, step, 6)
        return newest_on(nodes[0], memory) is not None

    await_true(told_again)


def test_a_node_without_memory_for_copies_says_so_and_copies_again_once_it_has(nodes: list[str]) -> None:
    """The keeper's process may make no file, in memory either. What it reserved for a torn copy is not left behind."""
    keepers = ensure_keepers({}, nodes)
    memory = StateKeepersClient(keepers, nodes, 0, attempt=1, remembers=True)
    first, second = (MemoryWriter(memory, recipe="r", attempt=1, rank=0, world=1) for _ in range(2))
    write_all(first, 1)
    await_true(lambda: first.is_ready and newest_on(nodes[1], memory) == 1)
    pid = next(held["pid"] for held in memory.list_sets() if held["node"] == nodes[1])
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 10, resource.RLIM_INFINITY))
    for step in range(2, 6):
        await_true(lambda: second.is_ready)
        write_all(second, step)
        await_true(lambda: second.is_ready)
        assert second.is_copy_refused
    assert newest_on(nodes[1], memory) == 1
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    for step in range(6, 9):
        await_true(lambda: second.is_ready)
        write_all(second, step)
        await_true(lambda: second.is_ready)
        assert not second.is_copy_refused
        assert newest_on(nodes[1], memory) == step


def test_all_ranks_and_keepers_give_their_memory_back_if_one_rank_has_none(nodes: list[str]) -> None:
    """Also a set that is completed, or to be copied, afterwards. The next attempt's sets are held again."""
    keepers = ensure_keepers({}, nodes)
    memories = [StateKeepersClient(keepers, nodes, rank, attempt=1, remembers=True) for rank in range(2)]
    writers = [MemoryWriter(memory, recipe="r", attempt=1, rank=rank, world=2) for rank, memory in enumerate(memories)]
    for step in range(1, 4):
        write(writers, step)
    memories[1].drop_all_sets()
    writers[0].write(4, cut(random_state(4), [ELEMENTS // 3], 0), common(4))
    await_true(lambda: not any(writer.is_ready or writer.failure is None for writer in writers))
    await_true(lambda: not memories[0].list_sets())
    again = StateKeepersClient(keepers, nodes[:1], 0, attempt=2, remembers=True)
    writer = MemoryWriter(again, recipe="r", attempt=2, rank=0, world=1)
    write_all(writer, 5, 2)
    await_true(lambda: newest_on(nodes[0], again) == 5)


def test_no_node_keeps_sets_of_an_earlier_group_once_the_ranks_have_made_two(nodes: list[str]) -> None:
    """Of neither the ranks that left the node nor those that it kept copies of."""
    keepers = ensure_keepers({}, nodes)
    memories = [StateKeepersClient(keepers, nodes, rank, attempt=1, remembers=True) for rank in range(2)]
    writers = [MemoryWriter(memory, recipe="r", attempt=1, rank=rank, world=2) for rank, memory in enumerate(memories)]
    for step in range(1, 4):
        write(writers, step)
    await_true(lambda: all(writer.is_ready for writer in writers))
    memory = StateKeepersClient(keepers, nodes[:1], 0, attempt=2, remembers=True)
    writer = MemoryWriter(memory, recipe="r", attempt=2, rank=0, world=1)

    def held() -> set[tuple[int, int, str]]:
        told = [(memory.describe(each), each["node"]) for each in memory.list_sets()]
        return {(about.attempt, about.rank, node) for about, node in told}

    write_all(writer, 4, 2)
    await_true(lambda: (2, 0, nodes[0]) in held())
    assert held() > {(1, rank, node) for rank in range(2) for node in nodes}, "one new set may still be lost"
    write_all(writer, 5, 2)
    await_true(lambda: held() == {(2, 0, nodes[0])})
