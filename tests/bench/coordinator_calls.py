"""What the coordinator of a run costs with many ranks: CPU seconds of its process for a heartbeat and for an answer to
the driver, and of the driver for such an answer. infra/docs/clusters.md says what was found.

    python tests/bench/coordinator_calls.py [RANKS]

A real Ray, a real coordinator, and ranks that only send heartbeats. CPU seconds hardly depend on what else runs on the
machine.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from launcher.runtime.cluster.coordinator import Coordinator

from checkpoints.attempt import Owner, claim
from data_service.store.local import LocalStore
from launcher.runtime.policies.elastic import Sizing
from launcher.runtime.policies.watchdog import Observer, RankLocation, Watchdog

ROUNDS, CALLERS, POLLS = 4, 2, 12


class MeasuredCoordinator(Coordinator):
    """A coordinator that tells how much CPU time its process has used."""

    def cpu(self) -> float:
        return time.process_time()


class Caller:
    """Ranks that only send heartbeats."""

    def beats(self, coordinator: Any, ranks: Sequence[int], step: int) -> None:
        place = RankLocation("n" * 56, 1234, "host-0123")
        ray.get([coordinator.beat.remote(rank, step, "training", place, 1, 0) for rank in ranks])


def measure(ranks: int) -> dict[str, float]:
    """Return the CPU seconds of one heartbeat, and for each rank of one answer to the driver."""
    store, owner = LocalStore(Path(tempfile.mkdtemp())), Owner.here(time.time())
    sizing = Sizing(ranks, ranks, ranks, wait=0.0, grow=float("inf"), each={"CPU": 1})
    options = ray.remote(num_cpus=0, concurrency_groups={"control": 1, "closing": 1})
    coordinator = options(MeasuredCoordinator).remote(claim(store, owner=owner), owner, sizing, None)
    callers = [ray.remote(num_cpus=0)(Caller).remote() for _ in range(CALLERS)]
    parts = [range(number, ranks, CALLERS) for number in range(CALLERS)]
    ray.get([caller.beats.remote(coordinator, part, 0) for caller, part in zip(callers, parts, strict=True)])
    before = ray.get(coordinator.cpu.remote())
    for step in range(1, ROUNDS + 1):
        ray.get(
            [
                caller.beats.remote(coordinator, part, step)
                for caller, part in zip(callers, parts, strict=True)
            ]
        )
    beaten = ray.get(coordinator.cpu.remote())
    observer, own = Observer(), time.process_time()
    for _ in range(POLLS):
        observer.look(ray.get(coordinator.status.remote()).beats)
        observer.stuck(Watchdog())
    own, told = time.process_time() - own, ray.get(coordinator.cpu.remote()) - beaten
    return {
        "heartbeat": (beaten - before) / (ROUNDS * ranks),
        "answer, coordinator": told / (POLLS * ranks),
        "answer, driver": own / (POLLS * ranks),
    }


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    for what, seconds in measure(ranks).items():
        print(f"{what:<22} {1e6 * seconds:8.2f} us of CPU a rank")


if __name__ == "__main__":
    main()
