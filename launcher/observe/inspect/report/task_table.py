"""The table of a run's results on tasks, for terminals and pages. It is stored with the run, one object for each row.

Figures are medians over seeds, and a row states the number of seeds. With one seed, or with the best of many,
differences between single fine-tunings would look like differences between checkpoints.
"""

from collections.abc import Mapping, Sequence
from statistics import mean

from pydantic import Field
from rich.table import Table
from rich.text import Text

from data_service.printable import one_line
from data_service.store.base import Store
from launcher.runtime.run.sealed import Sealed, hash_json, read_all_sealed, read_sealed, sealed_bytes

TABLE_PREFIX = "tables/"  # key prefix of the rows in the run's store


class TableRow(Sealed):
    """The results of one checkpoint on one task.

    Attributes:
        checkpoint, step, weights: name and step of the checkpoint, and digest of its weights.
        task, data, measure: name of the task, digest of its data, and what was measured.
        metric: name of the main metric.
        settings: the best settings among the grid's choices, without those that all choices share.
        choices: number of choices.
        median, lowest, highest: the main metric over seeds, with these settings; None without a finite figure.
        values: the main metric by seed.
        metrics: medians of all metrics, with these settings.
        searched: whether the corpora of the model were searched for the texts of each split but `train`; None if that
            is not known.
        cells, missing: number of the grid's cells for this checkpoint and task, and of those without a result.
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
    searched: dict[str, bool] | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def path(self) -> str:
        """The key of the row in the run's store: a hash of checkpoint, measure, task and data."""
        return f"{TABLE_PREFIX}{hash_json([self.weights, self.step, self.measure, self.task, self.data])}.json"


def average_over_tasks(table: Sequence[TableRow]) -> list[tuple[str, int | None, float]]:
    """Return checkpoint, step, and mean of the medians over tasks, for each checkpoint that has several tasks and a
    figure for each of them."""
    groups: dict[tuple[str, int | None, str], list[float | None]] = {}
    for row in table:
        groups.setdefault((row.checkpoint, row.step, row.weights), []).append(row.median)
    found = []
    for (checkpoint, step, _), medians in groups.items():
        known = [value for value in medians if value is not None]
        if len(medians) > 1 and len(known) == len(medians):
            found.append((checkpoint, step, mean(known)))
    return found


def store_rows(store: Store, rows: Sequence[TableRow]) -> None:
    """Store rows with the run at `store`, for its report, as `tables/<digest>.json`.

    A row replaces an earlier one about the same weights, step, measure, task and data. Raises StoreError; RunError if a
    newer version wrote that row.
    """
    for row in rows:
        read_sealed(store, row.path, TableRow)
        store.put(row.path, sealed_bytes(row))


def stored_rows(store: Store) -> list[TableRow]:
    """Return the rows that are stored with a run, by step, then by task. Objects that are not rows are left out. Raises
    StoreError."""
    found = read_all_sealed(store, [entry.key for entry in store.list(TABLE_PREFIX)], TableRow)
    return sorted(found, key=lambda row: (row.step or 0, row.task, row.data))


_COLUMN_HEADS = (
    *("checkpoint", "step", "task", "metric", "median", "lowest", "highest", "seeds", "settings"),
    *("searched", ""),
)
_SEARCHED_COLUMN = _COLUMN_HEADS.index("searched")
_NUMBER_COLUMNS = ("step", "median", "lowest", "highest", "seeds")  # right-aligned columns


def terminal_table(rows: Sequence[TableRow]) -> Table:
    """Return a table with a line for each checkpoint and task, and one for each checkpoint's average. Figures are
    multiplied by 100, as in papers."""
    table = Table(box=None, pad_edge=False)
    for head in column_names(rows):
        table.add_column(head, justify="right" if head in _NUMBER_COLUMNS else "left")
    for line in table_cells(rows):
        table.add_row(*(Text(one_line(text)) for text in line))
    return table


def table_cells(rows: Sequence[TableRow]) -> list[tuple[str, ...]]:
    """Return the cells of the table, as texts, without the heads.

    If no corpora were searched for a task's texts, that column is missing; `searched_note` is shown instead.
    """
    found = [_row_cells(row, rows) for row in rows]
    for checkpoint, step, average in average_over_tasks(rows):
        found.append((checkpoint, _step_text(step), "average", "", f"{100 * average:.2f}", *[""] * 6))
    return (
        found if _is_any_searched(rows) else [line[:_SEARCHED_COLUMN] + line[_SEARCHED_COLUMN + 1 :] for line in found]
    )


def column_names(rows: Sequence[TableRow]) -> tuple[str, ...]:
    """Return the column heads of `table_cells`."""
    return (
        _COLUMN_HEADS
        if _is_any_searched(rows)
        else _COLUMN_HEADS[:_SEARCHED_COLUMN] + _COLUMN_HEADS[_SEARCHED_COLUMN + 1 :]
    )


def searched_note(rows: Sequence[TableRow]) -> str | None:
    """Return a note if no corpora were searched for the tasks' texts; None if some were, or if that is not known."""
    if _is_any_searched(rows) or not any(row.searched for row in rows):
        return None
    return "The models' corpora were not searched for the texts of these tasks."


def _is_any_searched(rows: Sequence[TableRow]) -> bool:
    """Return whether the corpora of some row's model were searched for the row's task's texts."""
    return any(any((row.searched or {}).values()) for row in rows)


def _row_cells(row: TableRow, rows: Sequence[TableRow]) -> tuple[str, ...]:
    same_name = {other.data for other in rows if other.task == row.task}
    task = row.task if len(same_name) == 1 else f"{row.task} ({row.data[:8]})"
    return (
        row.checkpoint,
        _step_text(row.step),
        task,
        row.metric or "",
        _percent_text(row.median),
        _percent_text(row.lowest),
        _percent_text(row.highest),
        str(len(row.values)),
        _settings_text(row.settings, row.choices),
        _searched_text(row.searched),
        f"{row.missing} of {row.cells} cells missing" if row.missing else "",
    )


def _searched_text(splits: Mapping[str, bool] | None) -> str:
    """Return the cell that says for which splits of the task the model's corpora were searched."""
    if not splits:
        return ""
    if len(set(splits.values())) == 1:
        return "yes" if all(splits.values()) else "no"
    return ", ".join(split for split, found in splits.items() if found)


def _step_text(step: int | None) -> str:
    return "" if step is None else f"{step:,}"


def _percent_text(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _settings_text(chosen: Mapping[str, object], choices: int) -> str:
    words = ", ".join(f"{name} {_value_text(value)}" for name, value in chosen.items())
    return f"{words} (best of {choices})" if choices > 1 else words


def _value_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
