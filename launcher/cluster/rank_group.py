"""A group of ranks: Ray actors that are placed, given their ranks, followed and ended together.

If one rank dies the group ends, because training is collective. The coordinator decides which group comes next
(`launcher.cluster.coordinator`); what a rank does is in `launcher.cluster.worker`. Ray Train would do the same through
four more processes (a controller, a cleaner, a barrier, an autoscaler's coordinator). Each of those takes seconds to
start and is one more that may die.
"""

import os
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from data_service.service.feed import FeedHandle
from launcher.cluster.nodes import lost
from launcher.policies.elastic import GroupStart, Sizing
from launcher.rank.journal import Startup
from launcher.recipe.schema import Recipe

PLACED_S = 10.0  # for Ray to find the places that it was said to have
SEATED_S = 180.0  # for all processes to be there: a cold disk takes long to import from
_OTHERS_S = 2.0  # for the others to say why they end, once one has
_NODE_LABEL = "ray.io/node-id"

Waiting = Generator[None, None, None]
"""Yields now and then, so that whoever waits can look after other things."""


@dataclass(frozen=True)
class Assignment:
    """What the driver hands every rank."""

    run_uri: str
    coordinator: Any
    feed: FeedHandle
    recipe: Recipe
    save_multiple: int  # a pause falls on multiples of so many steps
    before: Mapping[str, float]  # seconds that the start has taken so far, by part


@dataclass(frozen=True)
class Spot:
    """Where a rank's process has come to be: node, address of the node, process, and GPUs that Ray gave it."""

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Seat:
    """A rank's number and address, as torch.distributed wants them.

    Attributes:
        local_rank, local_world: among the ranks of its node.
        node_rank: number of the node.
        master: host and port where rank 0 listens.
        gpus: of all ranks of the node; this one's is number `local_rank`. Empty where ranks compute on CPUs.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int
    master: tuple[str, int]
    gpus: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """The variables that torch, DeepSpeed and NCCL read. Ranks see all GPUs of their node, which NCCL needs to
        connect them."""
        found = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world,
            "NODE_RANK": self.node_rank,
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": self.master[1],
        } | (_of_gpus(self.gpus) if self.gpus else {})
        return {name: str(value) for name, value in found.items()}


def _of_gpus(numbers: Sequence[str]) -> dict[str, str]:
    """Memory is mapped in segments that grow: rows of many lengths break it into pieces that nothing fits into else."""
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return {"CUDA_VISIBLE_DEVICES": ",".join(numbers), "PYTORCH_ALLOC_CONF": allocator}


class RankProcess:
    """The actor's body."""

    def spot(self) -> Spot:
        context = ray.get_runtime_context()
        gpus = tuple(str(number) for number in context.get_accelerator_ids().get("GPU", []))
        return Spot(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), gpus)

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    def sit(self, seat: Seat) -> None:
        """Set the environment. Must run before torch is imported, because torch looks for GPUs only once."""
        os.environ.update(seat.environment())

    def run(self, seat: Seat, assignment: Assignment) -> None:
        began = time.monotonic()
        from launcher.cluster.worker import train_rank

        train_rank(seat, assignment, began)


def seats(spots: Sequence[Spot], port: int) -> list[Seat]:
    """The seats of processes that are sorted by rank (`ordered`). `port`: free on the first process's node."""
    nodes = list(dict.fromkeys(spot.node for spot in spots))
    found = []
    for rank, spot in enumerate(spots):
        here = [number for number, other in enumerate(spots) if other.node == spot.node]
        seat = Seat(
            rank=rank,
            world=len(spots),
            local_rank=here.index(rank),
            local_world=len(here),
            node_rank=nodes.index(spot.node),
            master=(spots[0].address, port),
            gpus=tuple(gpu for number in here for gpu in spots[number].gpus),
        )
        found.append(seat)
    return found


def ordered(spots: Sequence[Spot]) -> list[int]:
    """Indices of `spots` in the order of their ranks: node by node, by GPU."""
    first = {spot.node: index for index, spot in reversed(list(enumerate(spots)))}
    return sorted(range(len(spots)), key=lambda index: (first[spots[index].node], _number(spots[index])))


def _number(spot: Spot) -> tuple[int, str, int]:
    gpu = spot.gpus[0] if spot.gpus else ""
    return (int(gpu) if gpu.isdecimal() else 0, gpu, spot.pid)


class RankGroup:
    """The ranks of one start, as a context manager whose end kills those that are left.

    Attributes:
        failed: the ranks that ended the group by failing.
    """

    def __init__(self, start: GroupStart, sizing: Sizing) -> None:
        self.failed: list[int] = []
        self._count, self._each = start.ranks, dict(sizing.each)
        without = {_NODE_LABEL: f"!in({','.join(sorted(start.without))})"} if start.without else {}
        self._placement = placement_group(
            [self._each] * start.ranks,
            strategy="PACK",
            bundle_label_selector=[without] * start.ranks if without else None,
        )
        self._actors: list[Any] = []

    def __enter__(self) -> "RankGroup":
        return self

    def __exit__(self, *error: object) -> None:
        if lost() is not None:  # nobody is there to be asked, and they die with their node
            return
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)
        with suppress(RayError):
            remove_placement_group(self._placement)

    def live(self, assignment: Assignment, poll_s: float) -> Waiting:
        """Place the ranks, start them and follow them until all have ended. Yields every `poll_s` seconds or more
        often."""
        startup = Startup(assignment.before)
        placed = yield from self._placed(poll_s)
        if not placed:
            return
        startup.done("places")
        self._actors = [self._actor(bundle) for bundle in range(self._count)]
        spots = yield from self._all([actor.spot.remote() for actor in self._actors], poll_s, SEATED_S)
        if self.failed:
            return
        order = ordered(spots)
        self._actors, spots = [self._actors[index] for index in order], [spots[index] for index in order]
        ports = yield from self._all([self._actors[0].free_port.remote()], poll_s, SEATED_S)
        if self.failed:
            return
        taken = seats(spots, ports[0])
        for actor, seat in zip(self._actors, taken, strict=True):
            actor.sit.remote(seat)
        startup.done("processes")
        assignment = replace(assignment, before=startup.before | startup.seconds)
        ends = [actor.run.remote(seat, assignment) for actor, seat in zip(self._actors, taken, strict=True)]
        yield from self._all(ends, poll_s, float("inf"))

    def _placed(self, poll_s: float) -> Generator[None, None, bool]:
        deadline = time.monotonic() + PLACED_S
        while time.monotonic() < deadline:
            if self._placement.wait(poll_s):
                return True
            yield
        return False

    def _actor(self, bundle: int) -> Any:
        where = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
        options = ray.remote(RankProcess).options(
            num_cpus=self._each.get("CPU", 0),
            num_gpus=self._each.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=where,
        )
        return options.remote()

    def _all(self, refs: list[Any], poll_s: float, patience_s: float) -> Generator[None, None, list[Any]]:
        """The results of one call to each actor; none where one has `failed`."""
        deadline, left = time.monotonic() + patience_s, refs
        while left and not self.failed:
            if time.monotonic() > deadline:
                self.failed = [refs.index(ref) for ref in left]
                return []
            done, left = ray.wait(left, num_returns=len(left), timeout=poll_s)
            if any(_bad(ref) for ref in done):
                ray.wait(left, num_returns=len(left), timeout=_OTHERS_S)
                self.failed = [rank for rank, ref in enumerate(refs) if _bad(ref)]
            yield
        return [] if self.failed else ray.get(refs)


def _bad(ref: Any) -> bool:
    """Whether the call is over and has raised, or its process died."""
    if not ray.wait([ref], timeout=0)[0]:
        return False
    try:
        ray.get(ref)
    except RayError:
        return True
    return False
