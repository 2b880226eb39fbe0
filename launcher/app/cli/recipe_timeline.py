"""A recipe's timeline as a table, and its learning rate and batch size as a picture in characters."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.table import Table

from launcher.output import console, human_count, print_table
from launcher.runtime.rank.build import learning_rate_schedule
from launcher.runtime.recipe.phases import PHASE_KEYS, PhaseKey
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.timeline import TimelineSegment, batch_schedule, changing_weights, phase_at, timeline

_BAR_CHARACTERS = " ▁▂▃▄▅▆▇█"
_PLOT_COLUMNS = 72  # width of the plots in terminal columns
_RATE_ROWS = 6  # height of the learning rate's plot in lines
_CURVE_NAMES = {"one_minus_sqrt": "1 - sqrt", "inverse_sqrt": "1 / sqrt"}
_BATCH_ROWS = 2  # height of the batch's plot in lines


def print_timeline(recipe: Recipe) -> None:
    """Print a row for every stretch of steps, then the picture."""
    rate = learning_rate_schedule(recipe)
    print_table(_timeline_table(recipe, timeline(recipe, rate)))
    steps = _sample_steps(recipe.total_steps)
    rates = [rate(step) for step in steps]
    tokens = [_batch_tokens(recipe, step) for step in steps]
    lines = ["", f"learning rate, up to {max(rates):.3g}"]
    lines += plot_bars(rates, _RATE_ROWS)
    lines += ["", f"tokens of a step, up to {human_count(max(tokens))}"]
    lines += plot_bars(tokens, _BATCH_ROWS)
    for title, values in _phase_setting_curves(recipe, steps):
        lines += ["", title, *plot_bars(values, 1)]
    last = f"{recipe.total_steps - 1:,}"
    lines.append(f"step 0{last:>{max(len(last) + 1, len(steps) - 6)}}")
    for line in lines:
        console().print(line, highlight=False, markup=False, no_wrap=True, crop=False)


def _phase_setting_curves(recipe: Recipe, steps: Sequence[int]) -> Iterator[tuple[str, list[float]]]:
    """Yield title and curve of each further setting that phases change."""
    phases = [recipe.phases[phase_at(recipe, step)[0]] for step in steps]
    for key in PHASE_KEYS:
        if key.is_used(recipe):
            yield from key.curves(recipe, phases)


def timeline_records(recipe: Recipe) -> Iterator[dict[str, object]]:
    """Yield each stretch of steps for programs; infra/docs/records.md explains the keys."""
    for stretch in timeline(recipe, learning_rate_schedule(recipe)):
        phase = recipe.phases[stretch.phase]
        yield {
            "phase": stretch.phase,
            "first": stretch.first,
            "last": stretch.last,
            "length": phase.length,
            "unit": "rows" if phase.batch.sequences else "tokens",
            "batch": stretch.batches,
            "lr": stretch.rates,
            "curve": stretch.curve,
            "tokens": stretch.tokens,
            "weights": stretch.weights,
            **{key.record: key.value(recipe, phase) for key in PHASE_KEYS},
        }


def plot_bars(values: Sequence[float], height: int) -> list[str]:
    """Return `values`, none below 0, as bars of `height` lines of characters, top line first. A value above 0 is
    always visible.
    """
    top = max(values)
    eighths = [max(1, round(8 * height * value / top)) if value > 0 else 0 for value in values]
    return [
        "".join(_BAR_CHARACTERS[min(8, max(0, each - 8 * line))] for each in eighths).rstrip()
        for line in reversed(range(height))
    ]


def _sample_steps(total_steps: int) -> list[int]:
    """Return evenly spaced steps from first to last, one for each column."""
    columns = min(_PLOT_COLUMNS, total_steps)
    return [column * (total_steps - 1) // max(1, columns - 1) for column in range(columns)]


def _batch_tokens(recipe: Recipe, step: int) -> int:
    number, start = phase_at(recipe, step)
    phase = recipe.phases[number]
    each = 1 if phase.batch.tokens else recipe.input.texts_per_row * phase.length
    return batch_schedule(recipe, phase).batch_at_step(step - start) * each


def _timeline_table(recipe: Recipe, stretches: Sequence[TimelineSegment]) -> Table:
    names = ["phase", "steps", "tokens so far", "length", "batch", "learning rate", ""]
    more = _phase_setting_columns(recipe)
    table = Table(*names, *more, box=None, pad_edge=False)
    previous = None
    for stretch in stretches:
        phase = recipe.phases[stretch.phase]
        table.add_row(
            "" if stretch.phase == previous else str(stretch.phase),
            f"{stretch.first:,} - {stretch.last:,}",
            human_count(stretch.tokens),
            str(phase.length),
            _range_text(*(f"{batch:,}" for batch in stretch.batches))
            + (" rows" if phase.batch.sequences else " tokens"),
            _range_text(*(f"{rate:.3g}" for rate in stretch.rates)),
            _CURVE_NAMES.get(stretch.curve, stretch.curve),
            *(cell(stretch) for cell in more.values()),
        )
        previous = stretch.phase
    return table


def _phase_setting_columns(recipe: Recipe) -> dict[str, Callable[[TimelineSegment], str]]:
    """Return the columns of further settings that phases change: by title, the function that formats a cell."""
    found: dict[str, Callable[[TimelineSegment], str]] = {
        key.title: partial(_phase_setting_text, recipe=recipe, key=key) for key in PHASE_KEYS if key.is_used(recipe)
    }
    return found | {f"weight of {name}": partial(_source_weight_text, name=name) for name in changing_weights(recipe)}


def _phase_setting_text(stretch: TimelineSegment, recipe: Recipe, key: PhaseKey) -> str:
    return key.text(recipe, recipe.phases[stretch.phase])


def _source_weight_text(stretch: TimelineSegment, name: str) -> str:
    return _range_text(*(f"{weight:.3g}" for weight in stretch.weights[name]))


def _range_text(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"
