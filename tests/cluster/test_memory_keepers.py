"""Keepers of two nodes: sets are copied to the other node, one behind the other, until its keeper dies."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from checkpoints.layout import LineageSegment, elements
from checkpoints.memory import MemoryReader, MemoryWriter, Offer, manifest_of, newest_complete
from checkpoints.memory_slots import Common
from launcher.runtime.cluster.memory_keeper import NodeMemory, ensure_keepers
from tests.support.ranks.checkpointing import SHAPES, cut, random_state

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(300)]

ELEMENTS = sum(elements(shape) for shape in SHAPES.values())
SOON_S = 20.0  # less than the time after which a rank goes on without its partner


@pytest.fixture
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Ids of two nodes; this process is on the first."""
    room = {"num_cpus": 1, "object_store_memory": 150_000_000}
    cluster = Cluster(
        initialize_head=True, head_node_args={"temp_dir": str(tmp_path_factory.mktemp("r")), **room}
    )
    try:
        other = cluster.add_node(**room)
        ray.init(address=cluster.address)
        yield [ray.get_runtime_context().get_node_id(), other.node_id]
    finally:
        ray.shutdown()
        cluster.shutdown()


def await_true(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def write(writers: list[MemoryWriter], step: int) -> None:
    """Write the set of every rank as soon as all can, as ranks agree."""
    await_true(lambda: all(writer.ready for writer in writers))
    lineage = (LineageSegment(attempt=1, start=0, stop=step),)
    common = Common(shapes=SHAPES, own_kinds={}, memory={}, state={"step": step}, lineage=lineage)
    for rank, writer in enumerate(writers):
        writer.write(step, cut(random_state(step), [ELEMENTS // 3], rank), common if rank == 0 else None)


def left_on(node: str, memory: NodeMemory) -> tuple[int, MemoryReader]:
    """The newest step that the keeper of one node holds whole, and a reader of it."""
    offers = [Offer(memory.describe(held), held) for held in memory.held() if held["node"] == node]
    found = newest_complete(offers, "r")
    assert found is not None
    parts = {rank: memory.open_set(offer.place) for rank, offer in enumerate(found)}
    return found[0].description.step, MemoryReader(manifest_of([offer.description for offer in found]), parts)


def test_each_node_has_all_sets_of_the_newest_step_or_the_one_before(nodes: list[str]) -> None:
    keepers = ensure_keepers({}, nodes)
    memories = [
        NodeMemory(keepers, mine, other, remembers=True) for mine, other in (nodes, list(reversed(nodes)))
    ]
    writers = [
        MemoryWriter(memory, recipe="r", attempt=1, rank=rank, world=2)
        for rank, memory in enumerate(memories)
    ]
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
