"""What failures cost a recipe on a cluster: simulated months of each way to go on after a fault, and what breaks first
as the cluster grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from launcher.plan.estimate.estimate import Estimate, best_interval
from launcher.plan.failures.faults import MONTH_S, Fault, Outage, draw_faults, draw_outages
from launcher.plan.failures.limits import Limit, limits
from launcher.plan.failures.month import Setting, simulate
from launcher.plan.failures.recovery import Every, Run, Way, seconds, ways
from launcher.runtime.cluster.resources import sizing

MONTHS = 8


@dataclass(frozen=True)
class Outcome:
    """One way, over all simulated months at one interval between saves.

    Attributes:
        interval: seconds of training between saves.
        goodput, lowest, highest: share of wall time that ends up in the model: mean and extremes of the months.
        lost: mean share of wall time by cause, as in `Month`.
        restarts, stayed, from_store, ended, excluded: mean numbers a month, as in `Month`.
        steps: mean number of steps a month that are done twice.
    """

    interval: float
    goodput: float
    lowest: float
    highest: float
    lost: dict[str, float]
    restarts: float
    stayed: float
    from_store: float
    ended: float
    excluded: float
    steps: float


@dataclass(frozen=True)
class WayForecast:
    """One way with the recipe's intervals, and with the best ones.

    Attributes:
        way, chosen: with the recipe's settings.
        best, at_best: with as many steps between copies in memory as Young says, and the interval between saves that
            Daly says, by the mean time between restarts from the store.
    """

    way: Way
    chosen: Outcome
    best: Way
    at_best: Outcome

    @property
    def restart(self) -> float:
        """Seconds from a noticed death to the next step."""
        way = self.way
        state = way.load if way.copies is None else way.recall
        return seconds(way.anew if way.stay is None else way.stay) + state


@dataclass(frozen=True)
class Forecast:
    """What failures cost. `faults`: mean number of faults a month; `step`: seconds of a step without any."""

    setting: Setting
    faults: float
    step: float
    ways: tuple[WayForecast, ...]
    limits: tuple[Limit, ...]


def forecast(estimated: Estimate, progress: Callable[[int, int], None] = lambda done, of: None) -> Forecast:
    """Simulate `MONTHS` months of each way on the estimate's cluster, always with the same faults. The phase that takes
    longest stands for the run. `progress` is told how many simulations are done, and of how many."""
    recipe, cluster, saved = estimated.recipe, estimated.cluster, estimated.checkpoints
    phase = max(estimated.phases, key=lambda phase: phase.seconds)
    setting = Setting(
        nodes=cluster.nodes,
        ranks_of_node=cluster.gpus_per_node,
        sizing=sizing(recipe, cluster.ranks),
        microbatches=phase.microbatches,
        round=phase.compute / phase.rounds,
        rest=phase.step - phase.compute,
        blocked=saved.saving.blocked,
        behind=saved.saving.behind,
        hang=recipe.watchdog.step,
    )
    months = [(draw_faults(cluster, seed), draw_outages(seed)) for seed in range(MONTHS)]
    run = Run(
        size=saved.bytes,
        step=setting.full,
        zero=recipe.zero,
        compiled=recipe.compile is not False,
        spares=recipe.recovery.spares,
    )
    asked = recipe.recovery.memory_every
    best: Every = "never" if asked == "never" else "best"
    found, pairs = [], tuple(zip(ways(cluster, run, asked), ways(cluster, run, best), strict=True))
    for index, (way, better) in enumerate(pairs):
        progress(2 * index, 2 * len(pairs))
        chosen = outcome(setting, way, saved.chosen, months)
        progress(2 * index + 1, 2 * len(pairs))
        interval = best_interval(saved.saving, MONTH_S / max(chosen.from_store, 1 / MONTHS))
        found.append(WayForecast(way, chosen, better, outcome(setting, better, interval, months)))
    return Forecast(
        setting=setting,
        faults=fmean(len(faults) for faults, _ in months),
        step=setting.full,
        ways=tuple(found),
        limits=limits(cluster, setting, found[-1].way, found[-1].at_best.interval),
    )


def outcome(
    setting: Setting, way: Way, interval: float, months: Sequence[tuple[Sequence[Fault], Sequence[Outage]]]
) -> Outcome:
    """Return the means of the given months."""
    done = [simulate(setting, way, interval, faults, outages) for faults, outages in months]
    shares = [month.goodput for month in done]
    causes = sorted({cause for month in done for cause in month.lost})
    return Outcome(
        interval=interval,
        goodput=fmean(shares),
        lowest=min(shares),
        highest=max(shares),
        lost={cause: fmean(month.lost.get(cause, 0.0) / month.wall for month in done) for cause in causes},
        restarts=fmean(month.restarts for month in done),
        stayed=fmean(month.stayed for month in done),
        from_store=fmean(month.from_store for month in done),
        ended=fmean(month.ended for month in done),
        excluded=fmean(month.excluded for month in done),
        steps=fmean(month.lost.get("repeated", 0.0) for month in done) / setting.full,
    )
