"""What breaks first as a run grows: each thing that all ranks share, how much of it they use, and how many they may
be.

The costs of a call are measured (`tests/bench/coordinator_calls.py`), on one core of a machine of two.
"""

from dataclasses import dataclass

from launcher.plan.failures.month import Setting
from launcher.plan.failures.recovery import NETWORK_SHARE, Way
from launcher.runtime.capacity.devices import LINK_SHARE, Cluster
from launcher.runtime.policies.watchdog import beat_interval

CALL_CPU_S = 430e-6
"""CPU seconds of the coordinator's process for one heartbeat; 4e-6 of them are ours, the rest is Ray's."""
POLL_S = 0.25  # between two questions of the driver
STATUS_RANK_S = 6.2e-6  # CPU seconds of the coordinator for each rank of one answer: its heartbeat, encoded
DRIVER_RANK_S = 11.1e-6  # CPU seconds of the driver for each rank of one answer: decoded and looked at


@dataclass(frozen=True)
class Limit:
    """One thing that can run out.

    Attributes:
        what, formula: its name and the arithmetic, as text.
        used: share that is used.
        ranks: number of ranks that would use all of it; None if it does not depend on their number.
    """

    what: str
    formula: str
    used: float
    ranks: int | None


def limits(cluster: Cluster, setting: Setting, way: Way, interval: float) -> tuple[Limit, ...]:
    """Return what may run out, the scarcest first. `interval`: seconds between saves."""
    ranks = min(setting.sizing.most, cluster.ranks)
    beats = CALL_CPU_S / beat_interval(ranks) + STATUS_RANK_S / POLL_S
    driver = DRIVER_RANK_S / POLL_S
    found = [
        _of_ranks(
            "the coordinator's core",
            f"{ranks:,} x ({CALL_CPU_S * 1e6:.0f} us / {beat_interval(ranks):.0f} s a heartbeat"
            f" + {STATUS_RANK_S * 1e6:.1f} us / {POLL_S} s)",
            ranks,
            beats,
        ),
        _of_ranks(
            "the driver's core", f"{ranks:,} x {DRIVER_RANK_S * 1e6:.1f} us / {POLL_S} s", ranks, driver
        ),
        Limit(
            "an upload in an interval between saves",
            f"{setting.behind:.1f} s / {interval:.0f} s",
            setting.behind / interval,
            None,
        ),
    ]
    if way.copies is not None:
        every = way.copies.every * setting.full
        found.append(
            Limit(
                f"a node's network for copies ({NETWORK_SHARE:.0%} of it)",
                f"{way.copies.transfer:.3f} s at {LINK_SHARE:.0%} / {every:.2f} s",
                way.copies.transfer / every / NETWORK_SHARE,
                None,
            )
        )
    return tuple(sorted(found, key=lambda limit: -limit.used))


def _of_ranks(what: str, formula: str, ranks: int, each: float) -> Limit:
    return Limit(what, formula, ranks * each, int(1 / each))
