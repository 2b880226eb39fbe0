"""The table of an evaluation, as a terminal and a page show it."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from data_service.visible import one_line
from launcher.evaluate.table import TableRow, averages

_HEADS = ("checkpoint", "step", "task", "metric", "median", "lowest", "highest", "seeds", "settings", "")
_NUMBERS = ("step", "median", "lowest", "highest", "seeds")


def terminal_table(rows: Sequence[TableRow]) -> Table:
    """Figures x 100, as papers print them; a line for each checkpoint and task, and each checkpoint's average."""
    table = Table(box=None, pad_edge=False)
    for head in _HEADS:
        table.add_column(head, justify="right" if head in _NUMBERS else "left")
    for line in lines(rows):
        table.add_row(*(Text(one_line(text)) for text in line))
    return table


def lines(rows: Sequence[TableRow]) -> list[tuple[str, ...]]:
    """The cells of the table, as texts, without the heads."""
    found = [_line(row, rows) for row in rows]
    for checkpoint, step, average in averages(rows):
        found.append((checkpoint, _step(step), "average", "", f"{100 * average:.2f}", "", "", "", "", ""))
    return found


def heads() -> tuple[str, ...]:
    """Of the columns."""
    return _HEADS


def _line(row: TableRow, rows: Sequence[TableRow]) -> tuple[str, ...]:
    same_name = {other.data for other in rows if other.task == row.task}
    task = row.task if len(same_name) == 1 else f"{row.task} ({row.data[:8]})"
    return (
        row.checkpoint,
        _step(row.step),
        task,
        row.metric or "",
        _figure(row.median),
        _figure(row.lowest),
        _figure(row.highest),
        str(len(row.values)),
        _settings(row.settings, row.choices),
        f"{row.missing} of {row.cells} cells missing" if row.missing else "",
    )


def _step(step: int | None) -> str:
    return "" if step is None else f"{step:,}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _settings(chosen: Mapping[str, object], choices: int) -> str:
    told = ", ".join(f"{name} {_value(value)}" for name, value in chosen.items())
    return f"{told} (best of {choices})" if choices > 1 else told


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
