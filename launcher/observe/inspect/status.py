"""`maskfleet runs status`: the state of a run, as data and as text. Only the run's store is read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from rich.markup import escape
from rich.table import Table

from checkpoints.errors import DamagedCheckpoint, NewerFormat
from checkpoints.layout import CheckpointManifest
from checkpoints.listing import list_committed, read_manifest
from checkpoints.ownership import AttemptStatus, read_attempt_status
from data_service.errors import UserError
from data_service.printable import one_line
from data_service.store.base import Store
from launcher.observe.inspect.report.events import utc_text
from launcher.observe.inspect.report.figures import Interruption, compute_figures, find_interruptions, metric_medians
from launcher.output import human_count, human_duration
from launcher.runtime.run.history import History, StepHistory, read_history
from launcher.runtime.run.log import token_loss
from launcher.runtime.run.metrics import STEP_METRICS, losses_text, running_mean, term_losses
from launcher.runtime.run.outline import ForkOrigin, Outline, open_outline, runs_at
from launcher.runtime.run.step_table import Record

RunState = Literal["never started", "running", "finished", "stopped", "failed", "dead"]
_RATE_STEPS = 100  # number of newest steps whose median is the present rate
_BRIEF_SEGMENTS = 16  # number of newest segments of metrics that are read for a brief status
_STATE_BY_END_EVENT: dict[str, RunState] = {"stop": "stopped", "end": "finished", "failed": "failed"}


@dataclass(frozen=True)
class NewestCheckpoint:
    """The step of the newest readable checkpoint, and when it was committed, in seconds since 1970."""

    step: int
    committed: float


@dataclass(frozen=True)
class RunStatus:
    """The state of a run. Times are in seconds since 1970. None: not known, or does not apply.

    Attributes:
        state: state of the run. `dead`: it was running, and its last heartbeat is too old.
        reason: reason why it stopped or failed.
        stop_requested: who asked it to stop, while it still runs.
        attempt, host, pid: the newest attempt (start of training), and the machine and process of its command.
        since, heard: when that attempt began, and when the last heartbeat was.
        step, total_steps: number of steps done, and of steps in the recipe.
        tokens: number of tokens trained on, including those of the runs that it was forked from; None if the records
            that were read begin later than the newest checkpoint, as those of a brief status may.
        loss, terms: training losses, as running means over the newest steps: the weighted sum, and each loss term by
            name.
        flush_seconds: largest age, in seconds, of steps that a running run has not recorded yet.
        heldout, perplexity, heldout_terms: figures of the newest evaluation: the loss on hidden tokens, its perplexity,
            and the loss of each term.
        evaluated: number of steps after which the newest evaluation was made.
        figures: medians of the newest steps, by name.
        step_seconds, tokens_per_second: two of these medians.
        eta_seconds: seconds until the last step, at the present rate.
        checkpoint, checkpoint_problem: the newest checkpoint, or the reason why it cannot be read.
        microbatch, microbatch_why: rows of a microbatch in each phase, if memory decides them, and how they were found.
        interruptions, goodput, repeated_steps: figures of the whole run; None in a brief status.
        origins: checkpoints that it was forked from.
        evaluation_problem: reason why the newest evaluation of a commit failed.
        damage: messages about records that could not be read. They are missing in the other fields.
    """

    uri: str
    name: str
    state: RunState
    reason: str | None
    stop_requested: str | None
    attempt: int | None
    host: str | None
    pid: int | None
    since: float | None
    heard: float | None
    step: int
    total_steps: int
    tokens: int | None
    loss: float | None
    terms: dict[str, float]
    flush_seconds: float
    heldout: float | None
    perplexity: float | None
    heldout_terms: dict[str, float]
    evaluated: int | None
    step_seconds: float | None
    tokens_per_second: float | None
    figures: dict[str, float]
    eta_seconds: float | None
    checkpoint: NewestCheckpoint | None
    checkpoint_problem: str | None
    microbatch: tuple[int, ...] | None
    microbatch_why: str | None
    interruptions: tuple[Interruption, ...] | None
    goodput: float | None
    repeated_steps: int | None
    origins: tuple[ForkOrigin, ...]
    evaluation_problem: str | None
    damage: tuple[str, ...]


@dataclass(frozen=True)
class UnreadableRun:
    """A run, among several, whose status cannot be read, and the reason."""

    uri: str
    problem: str


def read_status(run: Outline, now: float, *, brief: bool = False) -> RunStatus:
    """Return the status of a run. Raises StoreError if the store cannot be read.

    `brief`: read only the newest metrics, which is quick even for a run of weeks, and leave out interruptions.
    """
    return status_from_history(run, read_history(run.store, _BRIEF_SEGMENTS if brief else None), now, brief=brief)


def last_seen(state: str, heard: float | None, now: float) -> float | None:
    """Return when a running or dead run was last seen to train, in seconds since 1970; None in other states."""
    return now if state == "running" else heard if state == "dead" else None


def status_from_history(run: Outline, history: History, now: float, *, brief: bool) -> RunStatus:
    """Return the status of a run, given its history, or that of its newest steps if `brief`. Raises StoreError."""
    found = read_attempt_status(run.store, now)
    manifest, problem = _newest_manifest(run.store)
    steps = history.steps
    step = max(int(steps.numbers[-1]) + 1 if len(steps) else 0, manifest.step if manifest else 0)
    state, reason = _state_and_reason(run, found, history.events, step)
    recent = metric_medians(steps, "status", _RATE_STEPS)
    step_seconds = recent.get("seconds")
    evaluation = history.evaluations[-1] if history.evaluations else None
    heard = found.heard if found else None
    figures = None if brief else compute_figures(history, last_seen(state, heard, now))
    rows = next((event for event in reversed(history.events) if event["kind"] == "microbatch"), None)
    return RunStatus(
        uri=run.uri,
        name=run.name,
        state=state,
        reason=reason,
        stop_requested=_stop_request(found, history.events) if state == "running" else None,
        attempt=found.attempt if found else None,
        host=found.owner.host if found else None,
        pid=found.owner.pid if found else None,
        since=found.owner.claimed if found else None,
        heard=heard,
        step=step,
        total_steps=run.total_steps,
        tokens=_trained_tokens(steps, manifest),
        loss=_recent_mean(steps, "loss"),
        terms=_term_losses(steps),
        flush_seconds=run.flush_seconds,
        heldout=token_loss(evaluation) if evaluation else None,
        perplexity=evaluation.get("perplexity") if evaluation else None,
        heldout_terms=term_losses(evaluation) if evaluation else {},
        evaluated=evaluation["step"] if evaluation else None,
        step_seconds=step_seconds,
        tokens_per_second=recent.get("tokens_per_second"),
        figures=recent,
        eta_seconds=step_seconds * (run.total_steps - step) if step_seconds and state == "running" else None,
        checkpoint=NewestCheckpoint(manifest.step, manifest.created) if manifest else None,
        checkpoint_problem=problem,
        microbatch=None if rows is None else tuple(rows["rows"]),
        microbatch_why=None if rows is None else rows["why"],
        interruptions=None if brief else tuple(find_interruptions(history)),
        goodput=figures.goodput if figures else None,
        repeated_steps=figures.repeated if figures else None,
        origins=run.origins,
        evaluation_problem=_evaluation_problem(history.events),
        damage=tuple(history.damage),
    )


def _state_and_reason(
    run: Outline, presence: AttemptStatus | None, events: Sequence[Record], step: int
) -> tuple[RunState, str | None]:
    """Return the state, and the recorded reason if the run has ended."""
    if presence is None:
        return "never started", None
    if presence.state != "ended":
        return presence.state, None
    last = next((event for event in reversed(events) if event["kind"] in _STATE_BY_END_EVENT), None)
    if last is None or float(last["time"]) < presence.owner.claimed:
        return ("finished" if step >= run.total_steps else "stopped"), None
    return _STATE_BY_END_EVENT[last["kind"]], last.get("reason")


def _stop_request(presence: AttemptStatus | None, events: Sequence[Record]) -> str | None:
    last = next((event for event in reversed(events) if event["kind"] == "stop_requested"), None)
    if presence is None or last is None or float(last["time"]) < presence.owner.claimed:
        return None
    return str(last["by"])


def _evaluation_problem(events: Sequence[Record]) -> str | None:
    """Return why the newest evaluation failed; None if it did not fail."""
    for event in reversed(events):
        if event["kind"] == "evaluated" and not event["failed"]:
            return None
        if event["kind"] == "evaluation_failed":
            return f"step {event['step']:,}: {event['what']}: {event['reason']}"
    return None


def _newest_manifest(store: Store) -> tuple[CheckpointManifest | None, str | None]:
    """Return the newest checkpoint's manifest, or None and the reason why it cannot be read."""
    marks = list_committed(store)
    if not marks:
        return None, None
    try:
        return read_manifest(store, marks[0]), None
    except (DamagedCheckpoint, NewerFormat) as error:
        return None, error.problem


def _trained_tokens(steps: StepHistory, manifest: CheckpointManifest | None) -> int | None:
    """Return the number of tokens trained on: up to the checkpoint, as its manifest states, and in the steps since.
    None if the first of these steps are not in `steps`."""
    before = manifest.state.get("tokens", 0) if manifest else 0
    assert isinstance(before, int)
    since = manifest.step if manifest else 0
    if len(steps) and steps.numbers[0] > since:
        return None
    return before + int(np.nansum(steps.column("tokens")[np.searchsorted(steps.numbers, since) :]))


def _term_losses(steps: StepHistory) -> dict[str, float]:
    """Return the running means of the losses by term."""
    named = {name: _recent_mean(steps, name) for name in sorted(steps.fields) if name.endswith("loss")}
    return term_losses({name: value for name, value in named.items() if value is not None})


def _recent_mean(steps: StepHistory, name: str) -> float | None:
    """Return the running mean of a field over the newest steps that were not skipped; None if none has a number."""
    values, mean = steps.column(name)[-_RATE_STEPS:], None
    skipped = steps.column("skipped")[-_RATE_STEPS:] > 0
    for value in values[np.isfinite(values) & ~skipped].tolist():
        mean = running_mean(mean, value)
    return mean


def read_statuses(uris: Sequence[str], now: float, *, brief: bool = False) -> Iterator[RunStatus | UnreadableRun]:
    """Return an iterator over the statuses of the runs at `uris` or directly below them.

    The status of a single run is complete unless `brief`. If there are several runs, their statuses are brief, and one
    that cannot be read is an `UnreadableRun`.

    Raises:
        RunError, StoreError: there is no run, or the only one cannot be read.
    """
    found = [run for uri in uris for run in runs_at(uri)]
    if len(found) == 1:
        return iter([read_status(open_outline(found[0]), now, brief=brief)])
    return (_brief_status_or_error(run, now) for run in found)


def _brief_status_or_error(uri: str, now: float) -> RunStatus | UnreadableRun:
    try:
        return read_status(open_outline(uri), now, brief=True)
    except UserError as error:
        return UnreadableRun(uri, error.problem)


_MAX_SHOWN_LINES = 5  # number of newest interruptions, or of damaged records, that are shown


def status_lines(run: RunStatus, now: float) -> Iterator[str]:
    """Yield the lines that `maskfleet runs status` prints about one run. `now`: seconds since 1970."""
    yield f"{run.name}  {run.uri}"
    for name, value in status_facts(run, now):
        yield f"{name:<12}{value}"
    yield from _interruption_lines(run)
    if run.damage:
        yield f"{'damaged':<12}{len(run.damage):,} records or objects could not be read; all else is without them:"
        yield from (f"{'':<12}{line}" for line in run.damage[:_MAX_SHOWN_LINES])
    for origin in reversed(run.origins):
        changes = f", changed: {'; '.join(line[2:] for line in origin.changes)}" if origin.changes else ""
        yield f"{'forked from':<12}{origin.run} at step {origin.step:,}{changes}"


def status_facts(run: RunStatus, now: float) -> Iterator[tuple[str, str]]:
    """Yield names and texts of what a run is doing now, for the terminal and for the report."""
    yield "state", _state_line(run, now)
    share = f" ({run.step / run.total_steps:.1%})"
    tokens = f", {human_count(run.tokens)} tokens" if run.tokens else ""
    age = f", recorded every {run.flush_seconds:g} s" if run.state == "running" else ""
    yield "progress", f"step {run.step:,} of {run.total_steps:,}{share}{tokens}{age}"
    if run.terms or run.heldout_terms:
        yield "loss", _loss_text(run)
    if run.figures:
        ahead = f", {human_duration(run.eta_seconds)} to go" if run.eta_seconds is not None else ""
        rates = (metric.value_text(run.figures[metric.name]) for metric in STEP_METRICS if metric.name in run.figures)
        yield "rate", f"{', '.join(rates)}{ahead}"
    yield "checkpoint", _checkpoint_text(run, now)
    if run.microbatch is not None:
        yield "microbatch", f"{', '.join(map(str, run.microbatch))} rows: {run.microbatch_why}"
    if run.goodput is not None:
        yield "goodput", f"{run.goodput:.1%}, {run.repeated_steps or 0:,} steps repeated"
    if run.evaluation_problem is not None:
        yield "evaluation", f"failed at {run.evaluation_problem}"


def status_table(runs: Sequence[RunStatus | UnreadableRun], now: float) -> Table:
    """Return a table with a line for each run."""
    heads = ("run", "state", "step", "of", "loss", "held out", "tokens/s", "to go", "checkpoint", "host")
    found = Table(*heads, box=None, pad_edge=False)
    for run in runs:
        name = escape(one_line(run.uri.rstrip("/").rpartition("/")[2]))
        if isinstance(run, UnreadableRun):
            found.add_row(name, "unreadable")
            continue
        found.add_row(
            name,
            run.state,
            f"{run.step:,}",
            f"{run.total_steps:,}",
            losses_text(run.terms),
            losses_text(run.heldout_terms),
            "" if run.tokens_per_second is None else human_count(run.tokens_per_second),
            "" if run.eta_seconds is None else human_duration(run.eta_seconds),
            "" if run.checkpoint is None else f"{human_duration(_seconds_since(run.checkpoint.committed, now))} ago",
            escape(one_line(run.host or "")) if run.state == "running" else "",
        )
    return found


def not_running_reason(presence: AttemptStatus | None) -> str:
    """Return why there is nothing to stop."""
    if presence is None:
        return "was never started"
    if presence.ended is not None:
        return f"is not running: its last start ended at {utc_text(presence.ended)} UTC"
    return (
        f"is not running: its last start, on {presence.owner.host}, was last heard of at {utc_text(presence.heard)} UTC"
    )


def _state_line(run: RunStatus, now: float) -> str:
    if run.attempt is None or run.heard is None or run.since is None:
        return run.state
    where = f"{run.host}, process {run.pid}, attempt {run.attempt}"
    heard = f"heard of {human_duration(_seconds_since(run.heard, now))} ago"
    match run.state:
        case "running":
            request = f"; asked to stop by {run.stop_requested}" if run.stop_requested else ""
            return f"running for {human_duration(_seconds_since(run.since, now))} on {where}, {heard}{request}"
        case "dead":
            return f"dead: it did not end, and is not running; last on {where}, {heard}"
        case _:
            return f"{run.state}: {run.reason}" if run.reason else run.state


def _loss_text(run: RunStatus) -> str:
    parts = [losses_text(run.terms)] if run.terms else []
    if run.heldout_terms:
        parts.append(f"held out after step {run.evaluated:,}: {losses_text(run.heldout_terms, run.perplexity)}")
    return "; ".join(parts)


def _checkpoint_text(run: RunStatus, now: float) -> str:
    if run.checkpoint_problem is not None:
        return f"the newest is damaged: {run.checkpoint_problem}"
    if run.checkpoint is None:
        return "none yet"
    return f"step {run.checkpoint.step:,}, {human_duration(_seconds_since(run.checkpoint.committed, now))} ago"


def _interruption_lines(run: RunStatus) -> Iterator[str]:
    if not run.interruptions:
        return
    older = len(run.interruptions) - _MAX_SHOWN_LINES
    more = f", the newest {_MAX_SHOWN_LINES}" if older > 0 else ""
    yield f"{'interrupted':<12}{len(run.interruptions):,} times{more}:"
    for gap in run.interruptions[-_MAX_SHOWN_LINES:]:
        then = "not resumed yet"
        if gap.resumed_from is not None and gap.downtime is not None:
            then = f"resumed at step {gap.resumed_from:,} after {human_duration(gap.downtime)}"
        yield f"{'':<12}{utc_text(gap.time)} UTC  {gap.cause}; {then}"


def _seconds_since(then: float, now: float) -> float:
    """Return the seconds since `then`; at least 0, because the clocks of two machines may differ."""
    return max(0.0, now - then)
