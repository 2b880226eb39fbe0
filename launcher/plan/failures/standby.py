"""What a run holds ready on each machine, so that a death costs little: spare processes, and copies of the state in
memory."""

from dataclasses import dataclass

from launcher.plan.estimate.estimate import Estimate
from launcher.plan.failures.recovery import SPARE_BYTES, Copies, copies


@dataclass(frozen=True)
class Standby:
    """What is held ready.

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
