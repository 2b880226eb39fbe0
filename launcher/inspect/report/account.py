"""A run's history, condensed for a page. Its size does not grow with the number of steps, so a watcher can keep it in
memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.inspect.report.figures import SUMMED, Figures, Interruption, figures, gaps, measure
from launcher.inspect.report.summary import Summary
from launcher.run.history import History
from launcher.run.step_table import Record


@dataclass(frozen=True)
class Account:
    """What a page is made from.

    Attributes:
        summary: of the step records on the committed lineage.
        evaluations: evaluation records, steps strictly increasing.
        events: all events, in order of time.
        figures: totals. gaps: every interruption.
        damage: what could not be read, for people.
    """

    summary: Summary
    evaluations: Sequence[Record]
    events: Sequence[Record]
    figures: Figures
    gaps: Sequence[Interruption]
    damage: Sequence[str]

    @classmethod
    def of(cls, history: History) -> "Account":
        """Of a whole history. Raises StoreError."""
        return cls(
            Summary.of(history.steps),
            history.evaluations,
            history.events,
            measure(history),
            gaps(history.events),
            history.damage,
        )

    @classmethod
    def kept(
        cls,
        summary: Summary,
        evaluations: Sequence[Record],
        events: Sequence[Record],
        *,
        repeated: int,
        tokens_per_second: float,
        damage: Sequence[str],
    ) -> "Account":
        """Of what a watcher keeps. `repeated`: step records that were superseded."""
        sums = {name: summary.total(name) for name in SUMMED}
        made = figures(summary.reached, sums, tokens_per_second, events, repeated)
        return cls(summary, evaluations, events, made, gaps(events), damage)
