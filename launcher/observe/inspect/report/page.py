"""The report on a run: one HTML file without references to anything outside it. The live page
(`launcher.observe.watch`) consists of the same sections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.observe.inspect.report import tables
from launcher.observe.inspect.report.chart import draw
from launcher.observe.inspect.report.curves import charts, draw_timeline
from launcher.observe.inspect.report.evaluations import evaluations
from launcher.observe.inspect.report.figures import Account
from launcher.observe.inspect.report.style import badge, document, header, table, text, tiles
from launcher.observe.inspect.report.summary import Axis
from launcher.observe.inspect.report.task_table import TableRow, heads, kept_rows, lines, searched_note
from launcher.output import human_count, human_duration, write_file
from launcher.runtime.run.evaluations import Evaluated, evaluated
from launcher.runtime.run.history import History, read_history
from launcher.runtime.run.log import token_loss
from launcher.runtime.run.metrics import shown_on
from launcher.runtime.run.outline import Outline, open_outline
from launcher.runtime.run.step_table import Record

if TYPE_CHECKING:
    from launcher.runtime.run.record import Run


@dataclass(frozen=True)
class ReportSubject:
    """The run that a page is about, without its history.

    Attributes:
        name, uri, created: name, URI and date of creation.
        total_steps: number of steps in the recipe.
        recipe: YAML text of the recipe.
        facts: further lines for the last section, by name: fingerprints, versions.
        baselines: reference losses on the held-out targets in nats, by name ("unigram", "left bigram").
        beside: evaluations of its commits beside training.
        evaluated: results of `maskfleet evaluate` for its checkpoints.
    """

    name: str
    uri: str
    created: str
    total_steps: int
    recipe: str
    facts: dict[str, str]
    baselines: dict[str, float]
    beside: tuple[Evaluated, ...] = ()
    evaluated: Sequence[TableRow] = ()


def render(subject: ReportSubject, history: History, now: datetime) -> str:
    """Return the page's HTML."""
    account = Account.of(history)
    body = [
        _header(subject, account, now),
        tiles(figures_of(subject, account)),
        drawings(subject, account),
        *sections(subject, account).values(),
    ]
    return document(f"{subject.name} - Maskfleet", body)


def drawings(
    subject: ReportSubject, account: Account, axis: Axis = "steps", *, readings: bool = False
) -> str:
    """Return the curves and the timeline. `readings`: as for `chart.draw`."""
    curves = (draw(chart, readings=readings) for chart in charts(account, subject.baselines, axis))
    return f'<div class="charts">{"".join(curves)}{draw_timeline(account.events)}</div>'


def sections(subject: ReportSubject, account: Account, *, folded: bool = False) -> dict[str, str]:
    """Return the sections below the curves, by name and in order; a section without content is empty text. `folded`:
    hide the recipe until the reader opens it."""
    events = account.events

    def of(*kinds: str) -> list[Record]:
        return [event for event in events if event["kind"] in kinds]

    return {
        "evaluations": evaluations(subject.beside, events),
        "evaluated": _evaluated(subject.evaluated),
        "interruptions": tables.interruptions(account.gaps),
        "rewinds": tables.rewinds(of("rewind")),
        "worlds": tables.worlds(of("world")),
        "checkpoints": tables.checkpoints(of("commit")),
        "nodes": tables.nodes(events),
        "damage": tables.damage(account.damage),
        "changes": tables.changes(of("identity_changed", "recipe_changed", "removals")),
        "configuration": _configuration(subject, "" if folded else " open"),
    }


def _header(subject: ReportSubject, account: Account, now: datetime) -> str:
    done = account.figures.steps >= subject.total_steps
    ended = [event["kind"] for event in account.events if event["kind"] in ("start", "resume", "stop")]
    state = "finished" if done else "stopped" if ended[-1:] == ["stop"] else "not finished"
    when = f"created {text(subject.created)}, report of {now.astimezone(UTC).isoformat(timespec='seconds')}"
    shown = badge(state, "" if done else " open")
    return header(subject.name, shown, f"<code>{text(subject.uri)}</code>", when)


def figures_of(subject: ReportSubject, account: Account) -> Iterator[tuple[str, str]]:
    """Yield the figures of the tiles, each with what it counts."""
    figures = account.figures
    yield f"{figures.steps:,}", f"of {subject.total_steps:,} steps"
    if account.evaluations:
        yield from held_out(subject, account.evaluations[-1])
    goodput = "-" if figures.goodput is None else f"{figures.goodput:.1%}"
    yield human_count(figures.tokens), "tokens trained on"
    yield human_count(figures.tokens_per_second), "tokens/s, median step"
    for metric in shown_on("tile"):
        if (mean := account.summary.mean(metric)) is not None:
            yield metric.spell(mean), metric.about()
    yield human_duration(figures.wall_seconds), "wall time"
    yield goodput, "goodput: steps that count"
    yield str(len(account.gaps)), f"interruptions, {figures.repeated:,} steps repeated"
    if figures.skipped:
        yield f"{figures.skipped:,}", "steps skipped, gradients not finite or far too large"


def held_out(subject: ReportSubject, evaluation: Record) -> Iterator[tuple[str, str]]:
    """Yield the figures of an evaluation, each with what it counts."""
    loss = token_loss(evaluation)
    perplexity = evaluation.get("perplexity")
    what = "" if perplexity is None else f" on hidden tokens, perplexity {perplexity:.1f}"
    yield f"{loss:.3f}", f"held-out loss{what}"
    for name, baseline in subject.baselines.items():
        side = "below" if loss <= baseline else "above"
        yield f"{abs(baseline - loss):.2f} nat", f"{side} the {name} baseline"


def _evaluated(rows: Sequence[TableRow]) -> str:
    if not rows:
        return ""
    shown = [line[1:] for line in lines(rows)]
    note = "Of each task the settings with the best median over seeds on its dev split; figures x 100."
    note = " ".join([note, *filter(None, [searched_note(rows)])])
    return f'<h2>Evaluation</h2><p class="soft">{note}</p>' + table(heads(rows)[1:], shown, 3)


def _configuration(subject: ReportSubject, opened: str) -> str:
    rows = [(name, value) for name, value in subject.facts.items()]
    recipe = f"<summary>recipe.yaml, as resolved</summary><pre>{text(subject.recipe)}</pre>"
    return (
        "<h2>Configuration</h2>" + table(("what", "value"), rows, 2) + f"<details{opened}>{recipe}</details>"
    )


def write_report(run: "Run", out: Path, *, with_baselines: bool, now: datetime) -> None:
    """Write the page about `run` to the local file `out`.

    Raises:
        CorpusError, StoreError: with baselines, and the corpora cannot be read.
        OutputError: `out` cannot be written.
    """
    write_file(out, render(subject(run, with_baselines=with_baselines), read_history(run.store), now))


def subject(run: "Run", *, with_baselines: bool) -> ReportSubject:
    """Return everything about the run that the page needs besides its history."""
    computed: dict[str, float] = {}
    objective = run.recipe.objective
    guessed = (objective.mlm, objective.clm, objective.plm)  # tokens, hidden or next
    if with_baselines and any(term is not None for term in guessed):
        from launcher.observe.inspect.baselines import baselines

        computed = baselines(run).named()
    return outlined(open_outline(run.uri, run.store), computed)


def outlined(run: Outline, baselines: dict[str, float]) -> ReportSubject:
    """Return what `subject` returns, from the outline of a run. Raises StoreError."""
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
