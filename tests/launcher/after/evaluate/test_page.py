"""What was found about a run's checkpoints is in the run's report."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from data_service.store.open import open_store
from launcher.after.evaluate.cell import CellFigures, Result
from launcher.after.evaluate.evaluation import rows
from launcher.observe.inspect.report.page import ReportSubject, render
from launcher.observe.inspect.report.task_table import TableRow, keep_rows, kept_rows
from launcher.runtime.run.history import read_history
from tests.support.tasks.small_cells import cell


def table(value: float, step: int = 100) -> list[TableRow]:
    grid = [cell(seed=seed, step=step, weights=str(step)) for seed in range(3)]
    measured = CellFigures(metrics={"accuracy": value})
    return rows(grid, {one.key: Result(rules=1, cell=one, measured=measured, versions={}) for one in grid})


def test_rows_are_kept_once_for_each_checkpoint_and_task_in_the_order_of_steps(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keep_rows(store, table(0.8, step=200))
    keep_rows(store, table(0.5))
    keep_rows(store, table(0.6))
    store.put("tables/broken.json", b"{")
    assert kept_rows(store) == table(0.6) + table(0.8, step=200)


def test_the_page_shows_them(tmp_path: Path) -> None:
    subject = ReportSubject("base", "runs/base", "today", 100, "", {}, {})
    history = read_history(open_store(tmp_path))
    page = render(replace(subject, evaluated=table(0.625)), history, datetime.now(UTC))
    assert "<h2>Evaluation</h2>" in page
    assert "62.50" in page
    assert "sst2" in page
    assert "<h2>Evaluation</h2>" not in render(subject, history, datetime.now(UTC))
