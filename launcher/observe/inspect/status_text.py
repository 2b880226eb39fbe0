"""A run's status as people read it."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.markup import escape
from rich.table import Table

from checkpoints.ownership import Presence
from data_service.visible import one_line
from launcher.format import human_count, human_duration
from launcher.observe.inspect.status import RunStatus, Unreadable
from launcher.runtime.run.terms import spell

_SHOWN = 5  # interruptions, the newest


def describe(run: RunStatus, now: float) -> Iterator[str]:
    """Everything about one run, a line a subject. `now` in seconds since 1970."""
    yield f"{run.name}  {run.uri}"
    yield f"{'state':<12}{_state_line(run, now)}"
    share = f" ({run.step / run.total_steps:.1%})"
    tokens = f", {human_count(run.tokens)} tokens" if run.tokens else ""
    age = f", recorded every {run.flush_seconds:g} s" if run.state == "running" else ""
    yield f"{'progress':<12}step {run.step:,} of {run.total_steps:,}{share}{tokens}{age}"
    if run.terms or run.heldout_terms:
        yield f"{'loss':<12}{_loss(run)}"
    if run.tokens_per_second is not None and run.step_seconds is not None:
        ahead = f", {human_duration(run.eta_seconds)} to go" if run.eta_seconds is not None else ""
        rate = f"{human_count(run.tokens_per_second)} tokens/s, {human_duration(run.step_seconds)} a step"
        yield f"{'rate':<12}{rate}{ahead}"
    yield f"{'checkpoint':<12}{_checkpoint(run, now)}"
    if run.microbatch is not None:
        yield f"{'microbatch':<12}{', '.join(map(str, run.microbatch))} rows: {run.microbatch_why}"
    if run.goodput is not None:
        yield f"{'goodput':<12}{run.goodput:.1%}, {run.repeated_steps or 0:,} steps repeated"
    if run.evaluation_problem is not None:
        yield f"{'evaluation':<12}failed at {run.evaluation_problem}"
    yield from _interruptions(run)
    yield from _damage(run.damage)
    for origin in reversed(run.origins):
        changes = f", changed: {'; '.join(line[2:] for line in origin.changes)}" if origin.changes else ""
        yield f"{'forked from':<12}{origin.run} at step {origin.step:,}{changes}"


def table(runs: Sequence[RunStatus | Unreadable], now: float) -> Table:
    """A line a run."""
    heads = ("run", "state", "step", "of", "loss", "held out", "tokens/s", "to go", "checkpoint", "host")
    found = Table(*heads, box=None, pad_edge=False)
    for run in runs:
        name = escape(one_line(run.uri.rstrip("/").rpartition("/")[2]))
        if isinstance(run, Unreadable):
            found.add_row(name, "unreadable")
            continue
        found.add_row(
            name,
            run.state,
            f"{run.step:,}",
            f"{run.total_steps:,}",
            spell(run.terms),
            spell(run.heldout_terms),
            "" if run.tokens_per_second is None else human_count(run.tokens_per_second),
            "" if run.eta_seconds is None else human_duration(run.eta_seconds),
            "" if run.checkpoint is None else f"{human_duration(_ago(run.checkpoint.committed, now))} ago",
            escape(one_line(run.host or "")) if run.state == "running" else "",
        )
    return found


def absent(found: Presence | None) -> str:
    """Why there is nothing to stop."""
    if found is None:
        return "was never started"
    if found.ended is not None:
        return f"is not running: its last start ended at {_date(found.ended)}"
    return f"is not running: its last start, on {found.owner.host}, was last heard of at {_date(found.heard)}"


def _state_line(run: RunStatus, now: float) -> str:
    if run.attempt is None or run.heard is None or run.since is None:
        return run.state
    where = f"{run.host}, process {run.pid}, attempt {run.attempt}"
    heard = f"heard of {human_duration(_ago(run.heard, now))} ago"
    match run.state:
        case "running":
            asked = f"; asked to stop by {run.stop_requested}" if run.stop_requested else ""
            return f"running for {human_duration(_ago(run.since, now))} on {where}, {heard}{asked}"
        case "dead":
            return f"dead: it did not end, and is not running; last on {where}, {heard}"
        case _:
            return f"{run.state}: {run.reason}" if run.reason else run.state


def _loss(run: RunStatus) -> str:
    parts = [spell(run.terms)] if run.terms else []
    if run.heldout_terms:
        parts.append(f"held out after step {run.evaluated:,}: {spell(run.heldout_terms, run.perplexity)}")
    return "; ".join(parts)


def _checkpoint(run: RunStatus, now: float) -> str:
    if run.checkpoint_problem is not None:
        return f"the newest is damaged: {run.checkpoint_problem}"
    if run.checkpoint is None:
        return "none yet"
    return f"step {run.checkpoint.step:,}, {human_duration(_ago(run.checkpoint.committed, now))} ago"


def _interruptions(run: RunStatus) -> Iterator[str]:
    if not run.interruptions:
        return
    older = len(run.interruptions) - _SHOWN
    more = f", the newest {_SHOWN}" if older > 0 else ""
    yield f"{'interrupted':<12}{len(run.interruptions):,} times{more}:"
    for gap in run.interruptions[-_SHOWN:]:
        then = "not resumed yet"
        if gap.resumed_from is not None and gap.downtime is not None:
            then = f"resumed at step {gap.resumed_from:,} after {human_duration(gap.downtime)}"
        yield f"{'':<12}{_date(gap.time)}  {gap.cause}; {then}"


def _damage(lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"{'damaged':<12}{len(lines):,} records or objects could not be read; all else is without them:"
        yield from (f"{'':<12}{line}" for line in lines[:_SHOWN])


def _ago(then: float, now: float) -> float:
    """Clocks of two machines may differ a little."""
    return max(0.0, now - then)


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
