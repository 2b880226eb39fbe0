"""From a run to its report file."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.observe.inspect.report.page import ReportSubject, render
from launcher.observe.inspect.report.task_table import kept_rows
from launcher.output import write_file
from launcher.runtime.run.evaluations import evaluated
from launcher.runtime.run.history import read_history
from launcher.runtime.run.outline import Outline, open_outline
from launcher.runtime.run.record import Run

if TYPE_CHECKING:
    from launcher.runtime.run.record import Run


def write_report(run: "Run", out: Path, *, with_baselines: bool, now: datetime) -> None:
    """Write the page about `run` to the local file `out`.

    Raises:
        CorpusError, StoreError: the baselines are asked for and the corpora cannot be read.
        OutputError: `out` cannot be written.
    """
    write_file(out, render(subject(run, with_baselines=with_baselines), read_history(run.store), now))


def subject(run: "Run", *, with_baselines: bool) -> ReportSubject:
    """What the page says about the run besides its history."""
    computed: dict[str, float] = {}
    objective = run.recipe.objective
    if with_baselines and (
        objective.mlm is not None or objective.plm is not None
    ):  # tokens are hidden, to guess
        from launcher.observe.inspect.baselines import baselines

        computed = baselines(run).named()
    return outlined(open_outline(run.uri, run.store), computed)


def outlined(run: Outline, baselines: dict[str, float]) -> ReportSubject:
    """The same of a run in outline. Raises StoreError."""
    return ReportSubject(
        name=run.name,
        uri=run.uri,
        created=run.record.created,
        total_steps=run.total_steps,
        recipe=run.recipe,
        facts=run.facts(),
        evaluated=kept_rows(run.store),
        baselines=baselines,
        beside=tuple(evaluated(run.store)),
    )
