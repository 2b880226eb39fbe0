"""Describes events in words. Any program may have written the events, so fields of any kind are shown as they are."""

from collections.abc import Mapping
from datetime import UTC, datetime

from data_service.printable import one_line
from launcher.runtime.run.step_table import Record

ROUTINE_EVENT_KINDS = frozenset({"commit", "evaluated", "evaluation_skipped", "preflight", "underway"})
"""The kinds of routine events, which neither pages nor sinks show."""
PROBLEM_EVENT_KINDS = frozenset(
    {
        *(
            "commit_failed",
            "corruption",
            "damaged_checkpoint",
            "death",
            "evaluation_failed",
            "failed",
            "hang",
        ),
        *("memory_failed", "memory_unshared", "records_lost", "rewind", "skipped_step", "straggler", "unfit"),
    }
)
"""The kinds of events that a page highlights."""

_UNLABELLED_FIELDS = ("reason", "cause", "what", "changes", "problems")  # fields shown without their name
_MAX_EVENT_CHARACTERS = 300


def describe_event(event: Record) -> str:
    """Return the event on one line, such as `death at step 8: a cosmic ray, ranks 1, 2`."""
    kind = str(event["kind"]).replace("_", " ")
    step = f" at step {_value_text(event['step'])}" if event.get("step") is not None else ""
    fields = {
        name: _value_text(value)
        for name, value in event.items()
        if name not in ("time", "kind", "attempt", "step") and value not in (None, "", [])
    }
    words = [fields.pop(name) for name in _UNLABELLED_FIELDS if name in fields]
    words += [f"{name.replace('_', ' ')} {value}" for name, value in fields.items()]
    return one_line(f"{kind}{step}{': ' if words else ''}{', '.join(words)}")[:_MAX_EVENT_CHARACTERS]


def _value_text(value: object) -> str:
    match value:
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.3g}"
        case list():
            return ", ".join(map(_value_text, value))
        case Mapping():
            return ", ".join(f"{name} {_value_text(one)}" for name, one in value.items())
    return str(value)


def utc_text(seconds: float) -> str:
    """Return a time since 1970 as date and time in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
