"""What faults cost a recipe on a cluster: simulated months of each way to go on after a fault.

    python tests/bench/failures.py roberta-large-160gb 128 --set microbatch=8

Four ways are compared, always with the same faults:

- **all new**: all processes are new, the state comes from the last commit in the store;
- **shared files**: the same, but Python's packages lie on a file system that all nodes share;
- **from memory**: all processes are new, or spare ones if each rank has one, and the state comes from the memory of the
  nodes while every part is on one of them.
- **survivors stay**: the same, and processes that did not die keep their seats or get others. All are new only after a
  hang. So runs go on.

Every constant is published, or measured on a machine of two cores, or marked as a guess.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Annotated, Literal

import typer
from failures_cluster import MONTH_S, PROCESS_S, Copies, Fault, Outage, Way, draw_faults, draw_outages
from failures_month import Month, Setting, simulate
from program import note, run

from launcher.plan.estimate.estimate import Estimate, best_interval_s, estimate_recipe, young_interval_s
from launcher.runtime.capacity.devices import (
    GPU_TO_HOST_BYTES_S,
    LINK_SHARE,
    NODE_MTBF_HOURS,
    STORE_BYTES_S,
    Cluster,
    find_gpu,
)
from launcher.runtime.cluster.resources import choose_sizing
from launcher.runtime.policies.recovery import COPY_TIME_SHARE
from launcher.runtime.recipe.load import load

MONTHS = 8
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
ENGINE_S = {0: 0.2, 1: 0.3, 2: 0.3, 3: 3.2}
"""A new group and engine in living processes, by ZeRO stage; measured."""
NETWORK_SHARE = 0.1  # share of a node's network that copies to partners may take

Every = int | Literal["auto", "best", "never"]
Months = Sequence[tuple[Sequence[Fault], Sequence[Outage]]]


@dataclass(frozen=True)
class Outcome:
    """A way, over all simulated months at one interval between saves; numbers are means a month.

    Attributes:
        interval: seconds of training between saves.
        goodput: share of wall time that ends up in the model.
        repeated: steps that are done twice.
        restarts, stayed, from_store, ended, excluded: as in `Month`.
    """

    interval: float
    goodput: float
    repeated: float
    restarts: float
    stayed: float
    from_store: float
    ended: float
    excluded: float


@dataclass(frozen=True)
class WayForecast:
    """A way with the recipe's intervals, and with the best ones: as many steps between copies in memory as Young says,
    and the interval between saves that Daly says, by the mean time between restarts from the store."""

    way: Way
    chosen: Outcome
    at_best: Outcome


def copies(cluster: Cluster, size: float, step: float, every: Every) -> Copies | None:
    """Return how often and how fast a state of `size` bytes is copied, where a step takes `step` seconds.

    Args:
        every: the recipe's `recovery.memory_every`; or "best": as rarely as Young says, by the time that training waits
            for a copy and the mean time between failures. "auto" and "best" burden steps and network at most by
            `COPY_TIME_SHARE` and `NETWORK_SHARE`.
    """
    if every == "never":
        return None
    stall, of_node = size / cluster.ranks / GPU_TO_HOST_BYTES_S, size / cluster.nodes
    transfer = of_node / (LINK_SHARE * cluster.gpu.network)
    best = round(young_interval_s(stall, cluster.mtbf / cluster.nodes) / step) if every == "best" else 1
    least = max(1, best, ceil(stall / (COPY_TIME_SHARE * step)), ceil(transfer / (NETWORK_SHARE * step)))
    return Copies(every if isinstance(every, int) else least, stall, transfer)


def ways(e: Estimate, step: float, every: Every) -> tuple[Way, ...]:
    """Return the four ways. `every`: as in `copies`."""
    cluster, recipe, ranks = e.cluster, e.recipe, e.cluster.ranks
    nccl, load_s = NCCL_RANK_S * ranks, e.checkpoints.bytes / cluster.nodes / STORE_BYTES_S
    processes = PROCESS_S + ranks / ACTORS_A_SECOND
    build = BUILD_S + (0.0 if recipe.compile is False else COMPILED_S)
    anew = processes + nccl + build
    shared = anew + FILES * cluster.nodes / FILES_A_SECOND
    found = copies(cluster, e.checkpoints.bytes, step, every)
    recall = 0.0 if found is None else found.stall + found.transfer
    spares = recipe.recovery.spares
    replaced = anew - processes if spares >= cluster.gpus_per_node else anew
    stay = nccl + ENGINE_S[recipe.zero]
    return (
        Way("all new", anew, COLD_IMPORTS_S, load_s),
        Way("shared files", shared, 0.0, load_s),
        Way("from memory", replaced, COLD_IMPORTS_S, load_s, spares=spares, recall=recall, copies=found),
        Way("survivors stay", anew, COLD_IMPORTS_S, load_s, stay, spares=spares, recall=recall, copies=found),
    )


def forecast(e: Estimate, progress: Callable[[str], None] = lambda name: None) -> list[WayForecast]:
    """Simulate `MONTHS` months of each way on the estimate's cluster. The phase that takes longest stands for the
    run."""
    phase = max(e.phases, key=lambda phase: phase.total_seconds)
    setting = Setting(
        nodes=e.cluster.nodes,
        ranks_of_node=e.cluster.gpus_per_node,
        sizing=choose_sizing(e.recipe, e.cluster.ranks),
        microbatches=phase.microbatches,
        round=phase.compute / phase.rounds,
        rest=phase.step_seconds - phase.compute,
        blocked=e.checkpoints.saving.blocked,
        behind=e.checkpoints.saving.behind,
        hang=e.recipe.watchdog.step,
    )
    months = [(draw_faults(e.cluster, seed), draw_outages(seed)) for seed in range(MONTHS)]
    asked = e.recipe.recovery.memory_every
    best: Every = "never" if asked == "never" else "best"
    found = []
    for way, better in zip(ways(e, setting.full, asked), ways(e, setting.full, best), strict=True):
        progress(way.name)
        chosen = outcome(setting, way, e.checkpoints.chosen, months)
        interval = best_interval_s(e.checkpoints.saving, MONTH_S / max(chosen.from_store, 1 / MONTHS))
        found.append(WayForecast(way, chosen, outcome(setting, better, interval, months)))
    return found


def outcome(setting: Setting, way: Way, interval: float, months: Months) -> Outcome:
    """Return the means of the given months."""
    done = [simulate(setting, way, interval, faults, outages) for faults, outages in months]

    def mean(value: Callable[[Month], float]) -> float:
        return fmean(map(value, done))

    return Outcome(
        interval=interval,
        goodput=mean(lambda month: month.goodput),
        repeated=mean(lambda month: month.lost.get("repeated", 0.0)) / setting.full,
        restarts=mean(lambda month: month.restarts),
        stayed=mean(lambda month: month.stayed),
        from_store=mean(lambda month: month.from_store),
        ended=mean(lambda month: month.ended),
        excluded=mean(lambda month: month.excluded),
    )


def render(found: Sequence[WayForecast]) -> str:
    """Return a table in Markdown, a way a column."""
    lines = [f"| | {' | '.join(one.way.name for one in found)} |", "|---" * (len(found) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in _rows(found))])


def _rows(found: Sequence[WayForecast]) -> Iterator[tuple[str, list[str]]]:
    yield "goodput", [f"{one.chosen.goodput:.3%}" for one in found]
    yield "best goodput", [f"{one.at_best.goodput:.3%}" for one in found]
    yield "at seconds between saves", [f"{one.at_best.interval:,.0f}" for one in found]
    yield "steps done twice there", [f"{one.at_best.repeated:,.0f}" for one in found]
    for name in ("restarts", "stayed", "from_store", "ended", "excluded"):
        yield name.replace("_", " "), [f"{getattr(one.at_best, name):,.1f}" for one in found]


def main(
    recipe: str,
    nodes: int,
    gpus_per_node: Annotated[int, typer.Option()] = 8,
    gpu: Annotated[str, typer.Option(help="As `maskfleet estimate` names it.")] = "H100",
    mtbf_hours: Annotated[float, typer.Option(help="Hours between failures of one machine.")] = NODE_MTBF_HOURS,
    assignments: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
) -> None:
    cluster = Cluster(nodes, gpus_per_node, find_gpu(gpu), mtbf_hours * 3600)
    typer.echo(render(forecast(estimate_recipe(load(recipe, tuple(assignments or ())), cluster), note)))


if __name__ == "__main__":
    run(main)
