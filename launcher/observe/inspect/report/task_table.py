"""The table of a run's results on tasks, as a terminal and a page show it: kept with the run, a row an object.

Figures are medians over seeds. A row says of how many, since with one seed, or with the best of many, differences
between single fine-tunings would pass for differences between checkpoints.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import mean

from rich.table import Table
from rich.text import Text

from data_service.printable import one_line
from data_service.store.base import Store
from launcher.runtime.run.sealed import Sealed, SealedReader, name_of, read, seal

ROWS = "tables/"


class TableRow(Sealed):
    """One checkpoint on one task.

    Attributes:
        checkpoint, step, weights: which checkpoint; its digest.
        task, data, measure: which task, its digest, and what was done.
        metric: the name of the main one.
        settings: those among the grid's choices that were chosen, as far as the choices differ; `choices`: how many.
        median, lowest, highest: of the main metric over seeds, under these settings; None without a finite figure.
        values: of the main metric by seed.
        metrics: medians of all metrics, under these settings.
        cells, missing: of the grid, for this checkpoint and task, and how many of them have no result.
    """

    checkpoint: str
    step: int | None
    weights: str
    task: str
    data: str
    measure: str
    metric: str | None
    settings: dict[str, object]
    choices: int
    median: float | None
    lowest: float | None
    highest: float | None
    values: dict[int, float | None]
    metrics: dict[str, float | None]
    cells: int
    missing: int

    @property
    def path(self) -> str:
        """Beside a run, by what it is about."""
        return f"{ROWS}{name_of([self.weights, self.step, self.measure, self.task, self.data])}.json"


def averages(table: Sequence[TableRow]) -> list[tuple[str, int | None, float]]:
    """(checkpoint, step, mean over tasks of the medians) of those that have a figure for every task, where there are
    several tasks."""
    groups = groupby(table, key=lambda row: (row.checkpoint, row.step, row.weights))
    found = []
    for (checkpoint, step, _), group in groups:
        medians = [row.median for row in group]
        known = [value for value in medians if value is not None]
        if len(medians) > 1 and len(known) == len(medians):
            found.append((checkpoint, step, mean(known)))
    return found


def keep_rows(store: Store, rows: Sequence[TableRow]) -> None:
    """Put with the run at `store`, for its report: `tables/<digest>.json`, one each; a row about the same weights, task
    and measure gives way. Raises StoreError; RunError: a newer version wrote that row."""
    for row in rows:
        read(store, row.path, TableRow)
        store.put(row.path, seal(row))


class RowReader:
    """Reads the rows that are stored with a run, again and again, each time only what is new (`SealedReader`)."""

    def __init__(self, store: Store) -> None:
        self._store, self._rows = store, SealedReader(store, TableRow)

    def read(self) -> list[TableRow]:
        """By step, then by task. What is no row is passed over. Raises StoreError kinds."""
        found = self._rows.read(self._store.list(ROWS))
        return sorted(found, key=lambda row: (row.step or 0, row.task, row.data))


def kept_rows(store: Store) -> list[TableRow]:
    """As one `RowReader` reads. Raises StoreError kinds."""
    return RowReader(store).read()


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
    """Return the cells of the table, as texts, without the heads."""
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
