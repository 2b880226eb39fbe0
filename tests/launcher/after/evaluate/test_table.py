"""Tables: the best settings by the median over seeds, whatever order results come in, and what is missing is said."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.after.evaluate.cell import Cell, CellFigures, Result
from launcher.after.evaluate.evaluation import rows
from launcher.observe.inspect.report.task_table import averages, lines
from tests.support.tasks.small_cells import cell

LRS, SEEDS = (1e-5, 2e-5, 5e-5), range(4)
GRID = [
    cell(source=source, weights=source, task=task, data=task, settings={"lr": lr, "epochs": 3}, seed=seed)
    for source in ("runs/a", "runs/b")
    for task in ("sst2", "rte")
    for lr in LRS
    for seed in SEEDS
]


def result(of: Cell, value: float | None) -> Result:
    measured = CellFigures(metrics={"accuracy": value, "f1": 0.5})
    return Result(rules=1, cell=of, measured=measured, versions={})


VALUES = st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=len(GRID), max_size=len(GRID))


@pytest.mark.long
@given(VALUES, st.randoms())
def test_the_choice_has_the_highest_median_and_the_order_of_results_is_nothing(values, random) -> None:  # type: ignore[no-untyped-def]
    results = {one.key: result(one, value) for one, value in zip(GRID, values, strict=True)}
    table = rows(GRID, results)
    shuffled = list(results.items())
    random.shuffle(shuffled)
    assert rows(GRID, dict(shuffled)) == table
    assert [(row.checkpoint, row.task) for row in table] == [
        ("runs/a", "sst2"), ("runs/a", "rte"), ("runs/b", "sst2"), ("runs/b", "rte"),
    ]  # fmt: skip
    for row in table:
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
    table = rows(GRID, results)
    assert sum(row.missing for row in table) == len(gone)
    for row in table:
        there = [
            sum(one.key in results for one in GRID if (one.source, one.task, one.settings["lr"]) == (*of, lr))
            for of in [(row.checkpoint, row.task)]
            for lr in LRS
        ]
        assert len(row.values) == max(there)
        assert (row.median is None) == (max(there) == 0)


def test_settings_that_do_not_differ_are_not_told() -> None:
    (row, *_) = rows(GRID, {one.key: result(one, one.seed / 10) for one in GRID})
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
    table = rows(GRID, results)
    [(uri, step, mean)] = averages(table)
    assert (uri, step) == ("runs/a", 100)
    assert mean == pytest.approx(0.7)
    last = lines(table)[-1]
    assert last[:5] == ("runs/a", "100", "average", "", "70.00")
    assert lines(table)[3][-1].startswith("12 of 12 ")


def test_the_same_task_with_other_data_is_told_apart() -> None:
    grid = [cell(data=data, task="sst2") for data in ("a" * 32, "b" * 32)]
    table = rows(grid, {one.key: result(one, 0.5) for one in grid})
    assert [line[2] for line in lines(table)][:2] == ["sst2 (aaaaaaaa)", "sst2 (bbbbbbbb)"]
