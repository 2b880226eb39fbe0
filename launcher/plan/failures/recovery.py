"""The seconds from a fault to the next step, part by part, and the ways to get there.

Four ways are compared:

- **all new**: all processes are new, the state comes from the last commit in the store;
- **all new, shared file system**: the same, but Python's packages lie on a file system that all nodes share;
- **state from memory**: all processes are new, or spare ones if each rank has one, and the state comes from the memory
  of the nodes while every part is on one of them.
- **survivors stay**: the same, and processes that did not die keep their seats or get others. All are new only after a
  hang. So runs go on.

Every constant is published, or measured on a machine of two cores, or marked as a guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from launcher.plan.estimate.estimate import Estimate, young
from launcher.plan.failures.faults import Kind
from launcher.runtime.capacity.devices import COPY_RATE, LINK_SHARE, STORE_RATE, Cluster
from launcher.runtime.policies.recovery import COPIES_SHARE
from launcher.runtime.policies.watchdog import beat_interval

NOTICED_S = 0.25
"""Until the driver knows that a process died: Ray says so at once, the driver looks every 0.25 s. The others hear of it
with the answer to their next heartbeat."""
NODE_NOTICED_S = 30.0
"""Until ranks raise because a whole machine is gone: NCCL over InfiniBand tries seven times for 4.3 s (NVIDIA, NCCL's
NCCL_IB_TIMEOUT=20 and NCCL_IB_RETRY_CNT=7)."""
PROCESS_S = 2.6  # new processes with their imports from the page cache; measured, two ranks
ACTORS_A_SECOND = 550.0
"""Actors that Ray starts in a second: Ray's release test many_actors, 10,000 actors."""
COLD_IMPORTS_S = 22.0  # torch and DeepSpeed from a disk whose cache is empty, on a node that is new; measured
FILES = 2500  # files that a rank's imports open; `maskfleet doctor` counts them
FILES_A_SECOND = 12_000.0
"""Files that a shared file system opens in a second: 1,128 files for each of 768 processes in 71 s on ARCHER's Lustre
(fenics-hpc.blogspot.com, October 2014)."""
NCCL_RANK_S = 265 / 98_304
"""NCCL's start, for each rank: 265 s on 96k GPUs (Meta, "Collective Communication for 100k+ GPUs", 2025). MegaScale
(2024) gives 5 s on 2,048 and less than 30 s on 10,000; this, 5.5 and 27."""
BUILD_S = 1.4  # the model and the first data in new processes; measured
COMPILED_S = 4.4  # compiled layers from their cache; measured
ENGINE_S = {
    0: 0.2,
    1: 0.3,
    2: 0.3,
    3: 3.2,
}  # a new group and engine in living processes, by ZeRO stage; measured
SPARE_AGAIN_S = (
    16.0  # until a node has a spare process again: 10 s after the first step, and its imports; measured
)
SPARE_BYTES = 500_000_000  # memory of a spare process, which has loaded torch and DeepSpeed; measured
NETWORK_SHARE = 0.1  # share of a node's network that copies to partners may take

Every = int | Literal["auto", "best", "never"]
Part = tuple[str, str, float]
"""What it is, the arithmetic, seconds."""


@dataclass(frozen=True)
class Copies:
    """Copies of the state in memory.

    Attributes:
        every: number of steps between two copies.
        stall: seconds that training waits for a copy to the host.
        transfer: seconds until the partner has it, over the whole network of a node.
        bytes: bytes on the host of one node: its own copy and its partner's, both twice, since the older one is kept
            until the newer one is complete.
    """

    every: int
    stall: float
    transfer: float
    bytes: float


@dataclass(frozen=True)
class Way:
    """One way to go on after a fault.

    Attributes:
        anew: seconds, by part, until all ranks step in new processes, from the time when the fault is noticed; the
            state apart.
        cold: seconds more if a node takes part that did not before.
        load: seconds to read a checkpoint in the store.
        stay: as `anew`, if the survivors stay; None if they never do.
        process: seconds more if they stay and no spare process is there.
        spares: number of spare processes on each node.
        recall: seconds to read the state in memory.
        copies: the copies in memory; None if there are none.
    """

    name: str
    anew: tuple[Part, ...]
    cold: float
    load: float
    stay: tuple[Part, ...] | None = None
    process: float = PROCESS_S
    spares: int = 1
    recall: float = 0.0
    copies: Copies | None = None


def seconds(parts: Sequence[Part]) -> float:
    """Return the sum of the parts."""
    return sum(part[2] for part in parts)


def noticed(kind: Kind, hang: float, ranks: int) -> float:
    """Return the seconds until all of `ranks` ranks have noticed a fault. `hang`: the watchdog's limit of a step."""
    rank = NOTICED_S + beat_interval(ranks)
    return {"rank": rank, "hang": hang, "node": NODE_NOTICED_S, "switch": NODE_NOTICED_S, "notice": 0.0}[kind]


def copies(cluster: Cluster, size: float, step: float, every: Every) -> Copies | None:
    """Return how often and how fast a state of `size` bytes is copied, where a step takes `step` seconds.

    Args:
        every: the recipe's `recovery.memory_every`; or "best": as rarely as Young says, by the time that training waits
            for a copy and the mean time between failures. "auto" and "best" burden steps and network at most by
            `COPIES_SHARE` and `NETWORK_SHARE`.
    """
    if every == "never":
        return None
    stall, of_node = size / cluster.ranks / COPY_RATE, size / cluster.nodes
    transfer = of_node / (LINK_SHARE * cluster.gpu.network)
    best = round(young(stall, cluster.mtbf / cluster.nodes) / step) if every == "best" else 1
    least = max(1, best, ceil(stall / (COPIES_SHARE * step)), ceil(transfer / (NETWORK_SHARE * step)))
    return Copies(every if isinstance(every, int) else least, stall, transfer, 4 * of_node)


@dataclass(frozen=True)
class Run:
    """What the ways depend on, beside the cluster.

    Attributes:
        size: bytes of the state.
        step: seconds of a step.
        zero: ZeRO stage.
        compiled: whether the layers are compiled.
        spares: the recipe's `recovery.spares`.
    """

    size: float
    step: float
    zero: int
    compiled: bool
    spares: int


def ways(cluster: Cluster, run: Run, every: Every) -> tuple[Way, ...]:
    """Return the four ways. `every`: as in `copies`."""
    ranks, load = cluster.ranks, run.size / cluster.nodes / STORE_RATE
    nccl: Part = ("NCCL", f"265 s / 98,304 x {ranks:,} ranks", NCCL_RANK_S * ranks)
    processes: Part = (
        "new processes",
        f"{PROCESS_S} s + {ranks:,} ranks / {ACTORS_A_SECOND:.0f}/s",
        PROCESS_S + ranks / ACTORS_A_SECOND,
    )
    imports: Part = (
        "imports, shared file system",
        f"{FILES:,} files x {cluster.nodes:,} nodes / {FILES_A_SECOND:,.0f}/s",
        FILES * cluster.nodes / FILES_A_SECOND,
    )
    anew = (processes, nccl, _build(run.compiled))
    found = copies(cluster, run.size, run.step, every)
    recall = 0.0 if found is None else found.stall + found.transfer
    spare: Part = ("spare processes take the seats", "as many as ranks", 0.0)
    replaced = (spare if run.spares >= cluster.gpus_per_node else processes, *anew[1:])
    return (
        Way("all new", anew, COLD_IMPORTS_S, load),
        Way("all new, shared file system", (processes, imports, nccl, _build(run.compiled)), 0.0, load),
        Way(
            "state from memory",
            replaced,
            COLD_IMPORTS_S,
            load,
            spares=run.spares,
            recall=recall,
            copies=found,
        ),
        Way(
            "survivors stay",
            anew,
            COLD_IMPORTS_S,
            load,
            stay=(nccl, (f"model and engine, ZeRO {run.zero}", "measured", ENGINE_S[run.zero])),
            spares=run.spares,
            recall=recall,
            copies=found,
        ),
    )


def _build(compiled: bool) -> Part:
    if compiled:
        return "model, data, compiled layers", f"{BUILD_S} s + {COMPILED_S} s", BUILD_S + COMPILED_S
    return "model, data", "measured", BUILD_S


@dataclass(frozen=True)
class Standby:
    """What a run holds ready on each machine, so that a death costs little: spare processes, and copies of the state.

    Attributes:
        spares: bytes of a node's memory for spare processes.
        copies: the copies in memory; None if the recipe wants none.
        network: share of a node's network that they take.
        step: seconds of a step in the phase that takes longest, which stands for the run.
    """

    spares: int
    copies: Copies | None
    network: float
    step: float


def standby(e: Estimate) -> Standby:
    """Return what the estimate's recipe holds ready on its cluster."""
    step = max(e.phases, key=lambda phase: phase.seconds).step
    found = copies(e.cluster, e.checkpoints.bytes, step, e.recipe.recovery.memory_every)
    network = 0.0
    if found is not None and e.cluster.nodes > 1:
        network = e.checkpoints.bytes / e.cluster.nodes / (e.cluster.gpu.network * found.every * step)
    return Standby(SPARE_BYTES * e.recipe.recovery.spares, found, network, step)
