"""What it costs the driver to talk with many ranks: CPU and time of a round of orders and news. infra/docs/clusters.md
says what was found.

    python tests/bench/rank_talks.py [RANKS]

A real Ray and the driver's real side; the ranks are handles of a few processes, which answer as a rank does. CPU
seconds hardly depend on what else runs on the machine.
"""

import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import ray

from launcher.runtime.cluster.orders import RankNews, RankOrders
from launcher.runtime.cluster.rank_group import RankGroup
from launcher.runtime.policies.elastic import GroupStart
from launcher.runtime.policies.watchdog import Beat, Observer, RankLocation, Watchdog, next_beat

ROUNDS, PROCESSES = 8, 4


class StandIn:
    """A process that answers for many ranks."""

    def talk(self, group: int, orders: RankOrders) -> RankNews:
        return RankNews(group, "training", 0, RankLocation("n" * 56, 1234, "host-0123"))


def measure(ranks: int) -> dict[str, float]:
    """Return CPU seconds of the driver for each rank and round, seconds of a round, and bytes of the driver's memory
    for each rank."""
    actors = [ray.remote(num_cpus=0)(StandIn).remote() for _ in range(PROCESSES)]
    ray.get([actor.talk.remote(0, RankOrders()) for actor in actors])
    memory = psutil.Process().memory_info().rss
    pool: Any = None
    group = RankGroup(GroupStart(ranks, frozenset()), pool)
    places: Any = [SimpleNamespace(actor=actors[rank % PROCESSES]) for rank in range(ranks)]
    group._places = places
    observer, beats = Observer(), dict[int, Beat]()
    own, began = time.process_time(), time.monotonic()
    for number in range(ROUNDS):
        group.orders = RankOrders(stop=number % 2 == 1)  # new orders: each rank is told at once
        heard = 0
        while heard < ranks:
            for rank, news in group.talk():
                heard += 1
                beats[rank] = next_beat(
                    beats.get(rank), Beat(1, news.step, news.doing, news.done, news.place)
                )
            observer.look(beats)
            observer.stuck(Watchdog())
            time.sleep(0.01)
    return {
        "us of CPU a rank and round": 1e6 * (time.process_time() - own) / (ROUNDS * ranks),
        "ms a round": 1e3 * (time.monotonic() - began) / ROUNDS,
        "KB a rank": (psutil.Process().memory_info().rss - memory) / 1000 / ranks,
    }


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    for what, found in measure(ranks).items():
        print(f"{found:10.1f} {what}")


if __name__ == "__main__":
    main()
