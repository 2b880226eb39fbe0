"""The seconds from a fault to the next step, part by part, and the ways to get there.

Three ways are compared:

- **all new**: all processes are new, the state comes from the last commit in the store;
- **all new, shared file system**: the same, but Python's packages lie on a file system that all nodes share;
- **survivors stay**: the survivors keep their processes, a spare process takes the place of a lost one, and the state
  comes from the ranks' memory. If that is impossible, the first way is taken.

Every constant is published, or measured on a machine of two cores, or marked as a guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from launcher.plan.estimate.estimate import young
from launcher.plan.failures.faults import Kind
from launcher.runtime.capacity.devices import COPY_RATE, LINK_SHARE, STORE_RATE, Cluster

NOTICED_S = 2.25
"""Until the driver knows that a process died: Ray says so at once, the driver looks every 0.25 s, and leaves the other
ranks 2 s to report."""
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
SPARE_S = 0.5  # a spare process takes its seat; a guess
SPARE_AGAIN_S = 30.0  # until a node has a spare process again; a guess
COPIES_SHARE = 0.01  # share of a step that copies to the host may take
NETWORK_SHARE = 0.1  # share of a node's network that copies to partners may take

Part = tuple[str, str, float]
"""What it is, the arithmetic, seconds."""


@dataclass(frozen=True)
class Copies:
    """Copies of the state in memory.

    Attributes:
        every: number of steps between two copies: Young's, of the stall and the mean time between failures, and at
            least as many as keep the burden on the steps and the network below `COPIES_SHARE` and `NETWORK_SHARE`.
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
        anew: seconds, by part, until all ranks step in new processes, from the time when the fault is noticed.
        cold: seconds more if a node takes part that did not before.
        load: seconds to read the checkpoint, which has to wait while the store does not answer.
        stay: seconds, by part, if the survivors stay; None if they never do.
        copies: the copies in memory; None if there are none.
    """

    name: str
    anew: tuple[Part, ...]
    cold: float
    load: float
    stay: tuple[Part, ...] | None = None
    copies: Copies | None = None


def seconds(parts: Sequence[Part]) -> float:
    """Return the sum of the parts."""
    return sum(part[2] for part in parts)


def noticed(kind: Kind, hang: float) -> float:
    """Return the seconds until a fault is noticed. `hang`: the watchdog's limit of a step."""
    return {"rank": NOTICED_S, "hang": hang, "node": NODE_NOTICED_S, "switch": NODE_NOTICED_S, "notice": 0.0}[
        kind
    ]


def copies(cluster: Cluster, size: float, step: float) -> Copies:
    """Return how often and how fast a state of `size` bytes is copied, where a step takes `step` seconds."""
    stall, of_node = size / cluster.ranks / COPY_RATE, size / cluster.nodes
    transfer = of_node / (LINK_SHARE * cluster.gpu.network)
    best = young(stall, cluster.mtbf / cluster.nodes) / step
    every = max(1, round(best), ceil(stall / (COPIES_SHARE * step)), ceil(transfer / (NETWORK_SHARE * step)))
    return Copies(every, stall, transfer, 4 * of_node)


def ways(cluster: Cluster, size: float, step: float, zero: int, *, compiled: bool) -> tuple[Way, Way, Way]:
    """Return the three ways for a state of `size` bytes in steps of `step` seconds."""
    ranks, load = cluster.ranks, size / cluster.nodes / STORE_RATE
    nccl = ("NCCL", f"265 s / 98,304 x {ranks:,} ranks", NCCL_RANK_S * ranks)
    building = BUILD_S + (COMPILED_S if compiled else 0.0)
    rest: tuple[Part, ...] = (
        nccl,
        (
            "model, data" + (", compiled layers" if compiled else ""),
            f"{BUILD_S} s" + (f" + {COMPILED_S} s" if compiled else ""),
            building,
        ),
    )
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
    found = copies(cluster, size, step)
    stay: tuple[Part, ...] = (
        nccl,
        (f"a new engine, ZeRO {zero}", "measured", ENGINE_S[zero]),
        ("a spare takes its seat", "assumed", SPARE_S),
        ("state from the host", f"a rank's part / {COPY_RATE / 1e9:.0f} GB/s", found.stall),
        ("a lost node's part, from its partner", "over the network", found.transfer),
    )
    local = Way("all new", (processes, *rest), COLD_IMPORTS_S, load)
    shared = Way("all new, shared file system", (processes, imports, *rest), 0.0, load)
    return local, shared, Way("survivors stay", (processes, *rest), COLD_IMPORTS_S, load, stay, found)
