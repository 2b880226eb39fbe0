"""The report on a run: one HTML file without references to anything outside it. `maskfleet runs watch` serves the same
page, and redraws it as records arrive."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.observe.inspect.report import tables
from launcher.observe.inspect.report.chart import draw_chart
from launcher.observe.inspect.report.curves import report_charts
from launcher.observe.inspect.report.evaluations import evaluations_html
from launcher.observe.inspect.report.figures import (
    Interruption,
    RunFigures,
    compute_figures,
    find_interruptions,
    metric_mean,
)
from launcher.observe.inspect.report.style import (
    escape_text,
    figure_tiles,
    html_page,
    html_table,
    page_header,
    state_badge,
)
from launcher.observe.inspect.report.task_table import TableRow, column_names, searched_note, stored_rows, table_cells
from launcher.observe.inspect.status import RunStatus, last_seen, status_facts, status_from_history
from launcher.output import human_count, human_duration, write_file
from launcher.runtime.run.evaluations import EvaluatedCommit, evaluated_commits
from launcher.runtime.run.history import History, read_history
from launcher.runtime.run.log import token_loss
from launcher.runtime.run.metrics import metrics_shown_on
from launcher.runtime.run.outline import Outline, open_outline
from launcher.runtime.run.step_table import Record

if TYPE_CHECKING:
    from launcher.runtime.run.record import Run

_BADGE_BY_STATE = {"finished": "", "running": " live", "failed": " bad", "dead": " bad"}  # CSS classes


@dataclass(frozen=True)
class ReportSubject:
    """The run that a page is about, without its history.

    Attributes:
        status: what the run is doing.
        baselines: reference losses on the held-out targets in nats, by name ("unigram", "left bigram").
        commit_evaluations: evaluations of its commits while it trained.
        task_rows: results of `maskfleet evaluate` for its checkpoints.
    """

    run: Outline
    status: RunStatus
    baselines: dict[str, float]
    commit_evaluations: tuple[EvaluatedCommit, ...] = ()
    task_rows: Sequence[TableRow] = ()


def write_report(run: "Run", out: Path, *, with_baselines: bool, now: datetime) -> None:
    """Write the page about `run` to the local file `out`.

    Raises:
        CorpusError, StoreError: `with_baselines` is set, and the corpora cannot be read.
        OutputError: `out` cannot be written.
    """
    write_file(out, draw_page(open_outline(run.uri, run.store), _load_baselines(run, with_baselines), now))


def draw_page(run: Outline, baselines: dict[str, float], now: datetime, head_html: str = "") -> str:
    """Return the page's HTML from the run's store. `head_html`: as for `style.html_page`. Raises StoreError."""
    history = read_history(run.store)
    subject = ReportSubject(
        run,
        status_from_history(run, history, now.timestamp(), brief=True),
        baselines,
        commit_evaluations=tuple(evaluated_commits(run.store)),
        task_rows=stored_rows(run.store),
    )
    return render_page(subject, history, now, head_html)


def _load_baselines(run: "Run", with_baselines: bool) -> dict[str, float]:
    objective = run.recipe.objective
    predicting = (objective.mlm, objective.clm, objective.plm)  # terms that predict hidden or next tokens
    if not with_baselines or all(term is None for term in predicting):
        return {}
    from launcher.observe.inspect.baselines import load_or_compute_baselines

    return load_or_compute_baselines(run).losses_by_name()


def render_page(subject: ReportSubject, history: History, now: datetime, head: str = "") -> str:
    """Return the page's HTML. `head`: as for `style.html_page`. Raises StoreError."""
    found = _sections(subject, history, now).items()
    parts = (f'<section id="s-{name}">{content}</section>' for name, content in found if content)
    return html_page(f"{subject.run.name} - Maskfleet", parts, head)


def _sections(subject: ReportSubject, history: History, now: datetime) -> dict[str, str]:
    """Return the sections of the page by name, in order; a section without content is empty text."""
    status = subject.status
    until = last_seen(status.state, status.heard, now.timestamp())
    figures, gaps = compute_figures(history, until), find_interruptions(history)
    curves = "".join(draw_chart(chart) for chart in report_charts(history, gaps, subject.baselines))
    return {
        "head": _header_html(subject.run, status, now),
        "figures": figure_tiles(_figure_tiles(subject, history, figures, gaps)),
        "charts": f'<div class="charts">{curves}</div>',
        "status": "<h2>Status</h2>" + html_table(("what", "now"), status_facts(status, now.timestamp()), 2),
        "evaluations": evaluations_html(subject.commit_evaluations, history.events),
        "evaluated": _task_table_html(subject.task_rows),
        "events": tables.events_table(history.events),
        "interruptions": tables.interruptions_table(gaps),
        "damage": tables.damage_table(history.damage),
        "configuration": _configuration_html(subject.run),
    }


def _header_html(run: Outline, status: RunStatus, now: datetime) -> str:
    when = f"created {escape_text(run.record.created)}, report of {now.astimezone(UTC).isoformat(timespec='seconds')}"
    why = f'<span class="why">{escape_text(status.reason)}</span>' if status.reason else ""
    shown = state_badge(status.state, _BADGE_BY_STATE.get(status.state, " open")) + why
    top = page_header(run.name, shown, f"<code>{escape_text(run.uri)}</code>", when)
    return top + _progress_html(status.step, run.total_steps, status.eta_seconds)


def _progress_html(step: int, total: int, eta_seconds: float | None) -> str:
    """Return the number of steps done, of all steps, as a bar and in words."""
    share = f" ({min(1.0, step / total):.1%})" if total else ""
    ahead = f", about {human_duration(eta_seconds)} to go" if eta_seconds is not None else ""
    bar = f'<progress max="{total}" value="{min(step, total)}" aria-label="steps done"></progress>'
    return f'<div class="progress">{bar}<span>step {step:,} of {total:,}{share}{ahead}</span></div>'


def _figure_tiles(
    subject: ReportSubject, history: History, figures: RunFigures, interruptions: Sequence[Interruption]
) -> Iterator[tuple[str, str]]:
    """Yield the number and the label of each tile of the page."""
    if history.evaluations:
        yield from _heldout_tiles(subject, history.evaluations[-1])
    goodput = "-" if figures.goodput is None else f"{figures.goodput:.1%}"
    yield human_count(figures.tokens), "tokens trained on"
    yield human_count(figures.tokens_per_second), "tokens/s, median step"
    for metric in metrics_shown_on("tile"):
        if (average := metric_mean(metric, history.steps)) is not None:
            yield metric.spell(average), metric.tile_label()
    yield human_duration(figures.wall_seconds), "wall time"
    yield goodput, "goodput: steps that count"
    yield str(len(interruptions)), f"interruptions, {figures.repeated:,} steps repeated"
    commits = sum(event["kind"] == "commit" for event in history.events)
    yield f"{commits:,}", f"checkpoints, for which training waited {human_duration(figures.blocked_seconds)}"
    if figures.skipped:
        yield f"{figures.skipped:,}", "steps skipped, gradients not finite or far too large"


def _heldout_tiles(subject: ReportSubject, evaluation: Record) -> Iterator[tuple[str, str]]:
    """Yield the number and the label of each tile about an evaluation."""
    loss = token_loss(evaluation)
    if loss is None:
        yield "not finite", "held-out loss"
        return
    perplexity = evaluation.get("perplexity")
    what = "" if perplexity is None else f" on hidden tokens, perplexity {perplexity:.1f}"
    yield f"{loss:.3f}", f"held-out loss{what}"
    for name, baseline in subject.baselines.items():
        side = "below" if loss <= baseline else "above"
        yield f"{abs(baseline - loss):.2f} nat", f"{side} the {name} baseline"


def _task_table_html(rows: Sequence[TableRow]) -> str:
    if not rows:
        return ""
    shown = [line[1:] for line in table_cells(rows)]
    note = "Of each task the settings with the best median over seeds on its dev split; figures x 100."
    note = " ".join([note, *filter(None, [searched_note(rows)])])
    return f'<h2>Evaluation</h2><p class="soft">{note}</p>' + html_table(column_names(rows)[1:], shown, 3)


def _configuration_html(run: Outline) -> str:
    recipe = f"<summary>recipe.yaml, as resolved</summary><pre>{escape_text(run.recipe)}</pre>"
    listed = html_table(("what", "value"), run.page_facts().items(), 2)
    return f"<h2>Configuration</h2>{listed}<details>{recipe}</details>"
