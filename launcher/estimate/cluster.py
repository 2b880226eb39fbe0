"""The machines an estimate is for."""

from dataclasses import dataclass

from launcher.errors import EstimateError
from launcher.estimate.gpus import Gpu


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines of `gpus_per_node` GPUs; `mtbf` seconds between failures of one node.

    Raises EstimateError: no machines, or machines that never work.
    """

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    mtbf: float

    def __post_init__(self) -> None:
        for what, value in (("nodes", self.nodes), ("GPUs per node", self.gpus_per_node)):
            if value < 1:
                raise EstimateError(f"{value} {what}: there is nothing to train on", remedy="give at least 1")
        if not self.mtbf > 0:
            raise EstimateError("a mean time between failures of 0 or less", remedy="give hours above 0")

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def rate(self) -> float:
        """Bytes/s of the slowest link of a ring through all GPUs, which crosses each node's network once."""
        return self.gpu.link if self.nodes == 1 else min(self.gpu.link, self.gpu.network)
