"""A recipe's timeline as a table, and as records for programs."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.table import Table

from launcher.output import human_count, print_table
from launcher.runtime.recipe.phases import PHASE_KEYS, PhaseKey
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.timeline import TimelineSegment, changing_weights, timeline

_CURVE_NAMES = {"one_minus_sqrt": "1 - sqrt", "inverse_sqrt": "1 / sqrt"}  # printed names of learning-rate decays


def print_timeline(recipe: Recipe) -> None:
    """Print a table of the recipe's timeline: a row for each segment, in which the learning rate follows one curve."""
    print_table(_timeline_table(recipe, timeline(recipe)))


def timeline_records(recipe: Recipe) -> Iterator[dict[str, object]]:
    """Yield a record, for programs, of each segment of steps; infra/docs/records.md explains the keys."""
    for segment in timeline(recipe):
        phase = recipe.phases[segment.phase]
        yield {
            "phase": segment.phase,
            "first": segment.first,
            "last": segment.last,
            "length": phase.length,
            "unit": "rows" if phase.batch.sequences else "tokens",
            "batch": segment.batches,
            "lr": segment.rates,
            "curve": segment.curve,
            "tokens": segment.tokens,
            "weights": segment.weights,
            **{key.record: key.value(recipe, phase) for key in PHASE_KEYS},
        }


def _timeline_table(recipe: Recipe, segments: Sequence[TimelineSegment]) -> Table:
    names = ["phase", "steps", "tokens so far", "length", "batch", "learning rate", ""]
    more = _phase_setting_columns(recipe)
    table = Table(*names, *more, box=None, pad_edge=False)
    previous = None
    for segment in segments:
        phase = recipe.phases[segment.phase]
        table.add_row(
            "" if segment.phase == previous else str(segment.phase),
            f"{segment.first:,} - {segment.last:,}",
            human_count(segment.tokens),
            str(phase.length),
            _range_text(*(f"{batch:,}" for batch in segment.batches))
            + (" rows" if phase.batch.sequences else " tokens"),
            _range_text(*(f"{rate:.3g}" for rate in segment.rates)),
            _CURVE_NAMES.get(segment.curve, segment.curve),
            *(cell(segment) for cell in more.values()),
        )
        previous = segment.phase
    return table


def _phase_setting_columns(recipe: Recipe) -> dict[str, Callable[[TimelineSegment], str]]:
    """Return the columns for further settings that phases change: for each title, the function that formats a cell."""
    found: dict[str, Callable[[TimelineSegment], str]] = {
        key.title: partial(_phase_setting_text, recipe=recipe, key=key) for key in PHASE_KEYS if key.is_used(recipe)
    }
    return found | {f"weight of {name}": partial(_term_weight_text, name=name) for name in changing_weights(recipe)}


def _phase_setting_text(segment: TimelineSegment, recipe: Recipe, key: PhaseKey) -> str:
    return key.text(recipe, recipe.phases[segment.phase])


def _term_weight_text(segment: TimelineSegment, name: str) -> str:
    return _range_text(*(f"{weight:.3g}" for weight in segment.weights[name]))


def _range_text(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"
