"""Tables: the best settings by the median over seeds, whatever order results come in, and what is missing is said."""

from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.store.local import LocalStore
from data_service.store.open import open_store
from launcher.after.evaluate.cells import Cell, CellFigures, CellResult, find_results, tabulate_results
from launcher.observe.inspect.report.page import draw_page
from launcher.observe.inspect.report.task_table import average_over_tasks, store_rows, stored_rows, table_cells
from launcher.runtime.run.outline import open_outline
from tests.support.runs.untrained import ToldRun

LRS, SEEDS = (1e-5, 2e-5, 5e-5), range(4)


def cell(**values: object) -> Cell:
    """A cell of no real checkpoint."""
    given: dict[str, object] = {
        "source": "runs/base",
        "step": 100,
        "weights": "w",
        "task": "sst2",
        "data": "d",
        "measure": "finetune",
        "settings": {"lr": 1e-5},
        "seed": 0,
    }
    return Cell.model_validate(given | values)


GRID = [
    cell(source=source, weights=source, task=task, data=task, settings={"lr": lr, "epochs": 3}, seed=seed)
    for source in ("runs/a", "runs/b")
    for task in ("sst2", "rte")
    for lr in LRS
    for seed in SEEDS
]


def result(of: Cell, value: float | None) -> CellResult:
    measured = CellFigures(metrics={"accuracy": value, "f1": 0.5})
    return CellResult(cell=of, measured=measured, searched=None, versions={})


VALUES = st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=len(GRID), max_size=len(GRID))


@pytest.mark.long
@given(VALUES, st.randoms())
def test_the_choice_has_the_highest_median_and_the_order_of_results_is_nothing(values, random) -> None:  # type: ignore[no-untyped-def]
    results = {one.key: result(one, value) for one, value in zip(GRID, values, strict=True)}
    rows = tabulate_results(GRID, results)
    shuffled = list(results.items())
    random.shuffle(shuffled)
    assert tabulate_results(GRID, dict(shuffled)) == rows
    assert [(row.checkpoint, row.task) for row in rows] == [
        ("runs/a", "sst2"), ("runs/a", "rte"), ("runs/b", "sst2"), ("runs/b", "rte"),
    ]  # fmt: skip
    for row in rows:
        medians = {}
        for lr in LRS:
            found = [
                results[one.key].measured.metrics["accuracy"]
                for one in GRID
                if (one.source, one.task, one.settings["lr"]) == (row.checkpoint, row.task, lr)
            ]
            medians[lr] = median(-1 if value is None else value for value in found)
        if row.median is not None:
            assert row.median == max(medians.values())
            assert medians[row.settings["lr"]] == row.median  # type: ignore[index]
        known = [value for value in row.values.values() if value is not None]
        assert (row.lowest, row.highest) == (min(known, default=None), max(known, default=None))
        assert (row.cells, row.missing, row.choices, len(row.values)) == (12, 0, 3, 4)


@given(st.sets(st.integers(0, len(GRID) - 1)))
def test_what_is_missing_is_counted_and_settings_with_fewer_seeds_are_not_chosen(gone: set[int]) -> None:
    results = {one.key: result(one, 0.5) for number, one in enumerate(GRID) if number not in gone}
    rows = tabulate_results(GRID, results)
    assert sum(row.missing for row in rows) == len(gone)
    for row in rows:
        there = [
            sum(one.key in results for one in GRID if (one.source, one.task, one.settings["lr"]) == (*of, lr))
            for of in [(row.checkpoint, row.task)]
            for lr in LRS
        ]
        assert len(row.values) == max(there)
        assert (row.median is None) == (max(there) == 0)


def test_settings_that_do_not_differ_are_not_shown() -> None:
    (row, *_) = tabulate_results(GRID, {one.key: result(one, one.seed / 10) for one in GRID})
    assert row.settings == {"lr": 1e-5}
    assert (row.lowest, row.highest) == (0.0, 0.3)
    assert row.median == pytest.approx(0.15)
    assert row.metrics == {"accuracy": pytest.approx(0.15), "f1": 0.5}


def test_averages_are_of_checkpoints_that_have_a_figure_for_every_task() -> None:
    results = {
        one.key: result(one, 0.8 if one.task == "sst2" else 0.6)
        for one in GRID
        if (one.source, one.task) != ("runs/b", "rte")
    }
    rows = tabulate_results(GRID, results)
    [(uri, step, mean)] = average_over_tasks(rows)
    assert (uri, step) == ("runs/a", 100)
    assert mean == pytest.approx(0.7)
    last = table_cells(rows)[-1]
    assert last[:5] == ("runs/a", "100", "average", "", "70.00")
    assert table_cells(rows)[3][-1].startswith("12 of 12 ")


def test_the_same_task_with_other_data_is_told_apart() -> None:
    grid = [cell(data=data, task="sst2") for data in ("a" * 32, "b" * 32)]
    rows = tabulate_results(grid, {one.key: result(one, 0.5) for one in grid})
    assert [line[2] for line in table_cells(rows)][:2] == ["sst2 (aaaaaaaa)", "sst2 (bbbbbbbb)"]


def test_keys_follow_what_decides_a_result_and_no_names() -> None:
    assert cell(source="elsewhere", step=None, task="renamed").key == cell().key
    for other in (
        {"weights": "x"},
        {"data": "e"},
        {"measure": "probe"},
        {"settings": {"lr": 2e-5}},
        {"seed": 1},
    ):
        assert cell(**other).key != cell().key


def test_damaged_and_misplaced_results_are_not_there(tmp_path: Path) -> None:
    store, one = open_store(tmp_path), cell()
    store.put(f"cells/{one.key}.json", result(one, 0.5).model_dump_json().encode())
    assert find_results(store) == find_results(store, [one.key]) == {one.key: result(one, 0.5)}
    other = cell(seed=1)
    store.put(f"cells/{other.key}.json", result(one, 0.5).model_dump_json().encode())
    store.put("cells/broken.json", b"{")
    assert set(find_results(store)) == {one.key}
    assert find_results(store, [other.key]) == {}


def test_rows_are_kept_with_the_run_and_its_page_shows_them(tmp_path: Path) -> None:
    def rows(value: float, step: int = 100) -> list:  # type: ignore[type-arg]
        grid = [cell(seed=seed, step=step, weights=str(step)) for seed in range(3)]
        return tabulate_results(grid, {one.key: result(one, value) for one in grid})

    store = open_store(tmp_path)
    for found in (rows(0.8, step=200), rows(0.5), rows(0.6)):
        store_rows(store, found)
    store.put("tables/broken.json", b"{")
    assert stored_rows(store) == rows(0.6) + rows(0.8, step=200)
    run = ToldRun(tmp_path / "run")
    store_rows(LocalStore(run.folder), rows(0.625))
    page = draw_page(open_outline(str(run.folder)), {}, datetime.now(UTC))
    assert "62.50" in page
    assert "sst2" in page
