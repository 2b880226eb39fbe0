"""Describes events in words, for lists on pages. Any program may have written the events, so missing or unexpected
fields are shown as they are."""

from collections.abc import Callable, Mapping

from data_service.printable import one_line
from launcher.runtime.run.step_table import Record

_LONGEST = 300  # characters


def spell_event(event: Record) -> str:
    """Return the event in words, on one line."""
    spelled = _WORDS.get(event["kind"], _plain)
    return one_line(spelled(_Fields(event)))[:_LONGEST]


def is_trouble(event: Record) -> bool:
    """Return whether the event is a problem, which a page highlights."""
    return event["kind"] in _TROUBLE


class _Fields:
    """An event's fields as text."""

    def __init__(self, event: Mapping[str, object]) -> None:
        self.event = event

    def __getitem__(self, name: str) -> str:
        value = self.event.get(name)
        if value is None:
            return "?"
        if isinstance(value, bool | str):
            return str(value)
        if isinstance(value, int):
            return f"{value:,}"
        if isinstance(value, float):
            return f"{value:.3g}"
        if isinstance(value, list):
            return ", ".join(map(str, value)) or "none"
        return str(value)

    def reason(self, name: str = "reason") -> str:
        return f": {self[name]}" if self.event.get(name) else ""


def _plain(of: _Fields) -> str:
    rest = [f"{name} {of[name]}" for name in of.event if name not in ("time", "kind", "attempt")]
    return " ".join((str(of.event["kind"]).replace("_", " "), *rest))


def _death(of: _Fields) -> str:
    who = f"rank {of['ranks']}" if of.event.get("ranks") else "ranks"
    return f"{who} died at step {of['step']}{of.reason()}"


_WORDS: dict[str, Callable[[_Fields], str]] = {
    "start": lambda of: f"started with {of['world']} ranks",
    "resume": lambda of: f"went on from step {of['step']} with {of['world']} ranks",
    "underway": lambda of: f"first step of this start done, step {of['step']}",
    "memory_failed": lambda of: f"no copies of the state in memory from step {of['step']}{of.reason()}",
    "memory_unshared": lambda of: f"copies of rank {of['rank']} are on {of['host']} alone{of.reason()}",
    "commit": lambda of: f"checkpoint at step {of['step']}, written in {of['seconds']} s",
    "commit_failed": lambda of: f"no checkpoint at step {of['step']}{of.reason()}",
    "tidy_failed": lambda of: f"old checkpoints could not be deleted{of.reason()}",
    "damaged_checkpoint": lambda of: f"a checkpoint is damaged{of.reason('what')}",
    "skipped_step": lambda of: f"step {of['step']} made no update{of.reason()}",
    "records_lost": lambda of: f"{of['records']} records of {of['what']} were lost",
    "rewind": lambda of: f"went back from step {of['step']} to {of['to']}{of.reason()}",
    "stop": lambda of: f"stopped at step {of['step']}{of.reason()}",
    "end": lambda of: f"finished at step {of['step']}",
    "failed": lambda of: f"failed{of.reason()}",
    "stop_requested": lambda of: f"{of['by']} asked it to stop",
    "fork": lambda of: f"forked from {of['run']} at step {of['step']}",
    "evaluated": lambda of: f"checkpoint of step {of['step']} evaluated in {of['seconds']} s",
    "evaluation_failed": lambda of: f"step {of['step']}: {of['what']} could not be evaluated{of.reason()}",
    "evaluation_skipped": lambda of: f"not evaluated: steps {of['steps']}{of.reason()}",
    "recipe_changed": lambda of: f"settings changed: {of['changes']}",
    "identity_changed": lambda of: f"what the run is was changed: {of['changes']}",
    "heldout_rules": lambda of: (
        f"held-out rules of sources differ ({'compared' if of.event.get('compared') else 'not compared'}): {of['what']}"
    ),
    "removals": lambda of: f"goes on without removed documents from step {of['step']}",
    "pause": lambda of: f"paused{of.reason()}",
    "world": lambda of: f"{of['to']} ranks instead of {of['from']}{of.reason('cause')}",
    "preflight": lambda of: f"preflight on {of['host']}: {of['verdict']}",
    "unfit": lambda of: f"{of['host']} is not fit to train: {of['problems']}",
    "straggler": lambda of: (
        f"rank {of['rank']} on {of['host']} is {of['ratio']} times slower ({of['doing']})"
    ),
    "corruption": lambda of: f"weights differed between ranks at step {of['step']}: {of['hosts']}",
    "death": _death,
    "hang": lambda of: f"ranks were stuck{of.reason('what')}",
}

_TROUBLE = (
    *("commit_failed", "damaged_checkpoint", "skipped_step", "records_lost", "rewind", "failed", "unfit"),
    *("evaluation_failed", "straggler", "corruption", "death", "hang", "memory_failed", "memory_unshared"),
)
