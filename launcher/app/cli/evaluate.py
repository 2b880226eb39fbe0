"""`maskfleet evaluate`: fine-tunes a grid of checkpoints, tasks, settings and seeds, and prints a table of results.

A cell is one point of the grid: one fine-tuning, with its metrics.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.long_commands import print_stderr as _say
from launcher.app.cli.options import (
    CHECKPOINT_HELP,
    DataOption,
    JsonOption,
    print_json,
    require_assignments,
    require_model,
)
from launcher.errors import OptionError
from launcher.progress import work

if TYPE_CHECKING:
    from data_service.store.base import Store
    from launcher.after.evaluate.cells import Cell, MeasureSpec
    from launcher.after.evaluate.grid import CellFailure
    from launcher.after.tasks.task import Task
    from launcher.observe.inspect.report.task_table import TableRow


CheckpointsArgument = Annotated[list[str], typer.Argument(metavar="CHECKPOINT...", help=f"Runs, {CHECKPOINT_HELP}")]
SuiteArgument = Annotated[str, typer.Argument(metavar="SUITE", help="Name of a bundled suite or task, or a YAML file.")]
ResultsOption = Annotated[
    str, typer.Option("--results", help="Folder or s3:// URI for results; several commands may share it.")
]
StepsOption = Annotated[
    list[str] | None,
    typer.Option("--step", help="Step of the runs' checkpoint, or `all`. Repeatable. Default: the newest good one."),
]
TaskOption = Annotated[list[str] | None, typer.Option("--task", help="Only this task of the suite. Repeatable.")]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of the tasks; all values of a list are tried: --set lr=[1e-5,3e-5].",
    ),
]
CpusOption = Annotated[
    float, typer.Option("--cpus-per-cell", min=0.01, help="Cores per fine-tuning; with 0.5, two share a core.")
]
GpusOption = Annotated[
    float | None,
    typer.Option(
        "--gpus-per-cell",
        min=0.0,
        help="GPUs per fine-tuning; with 0.25, four share a GPU. Default: 1 if there are GPUs.",
    ),
]


def evaluate(
    checkpoints: CheckpointsArgument,
    suite: SuiteArgument,
    results: ResultsOption,
    data: DataOption = None,
    steps: StepsOption = None,
    tasks: TaskOption = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds: 0, 1, ...")] = 5,
    assignments: SettingOption = None,
    cpus: CpusOption = 1.0,
    gpus: GpusOption = None,
    only_table: Annotated[
        bool,
        typer.Option("--only-table", help="Compute nothing; print the table of the stored results."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune every checkpoint on every task of a suite with every setting and seed, and print the table.

    Each fine-tuning (a cell of the grid) is a task on the Ray cluster in RAY_ADDRESS, or on one started here. Results
    are stored in --results, so repeating the command computes only missing ones. For each checkpoint and task, the
    table has the setting with the best median over seeds on dev, and whether the model's corpora were searched for the
    task's texts.

    Exit codes: 0 all results are stored; 2 some cannot be computed, and are named below the table; 75 an error that may
    pass: run the command again.

    Example: `maskfleet evaluate s3://bucket/runs/base glue --data glue/ --results s3://bucket/results`
    """
    from data_service.store.open import open_store

    wanted = _parse_step_options(steps)
    require_assignments(assignments or ())
    selected = _select_tasks(suite, data, tasks)
    for checkpoint in () if only_table else checkpoints:
        require_model(checkpoint)
    with work("loading libraries"):
        from launcher.after.evaluate.cells import find_results, tabulate_results
    store = open_store(results)
    if only_table:
        found = find_results(store)
        shown = [task.name for task in selected]
        cells = _select_cells([result.cell for result in found.values()], checkpoints, wanted, shown)
        _say(f"{len(cells)} of {len(found)} results in {results} belong to these checkpoints and tasks")
        _print_table(tabulate_results(cells, found), as_json)
        return
    from launcher.after.evaluate.measures import plan_measures

    measures = plan_measures(selected, assignments or ())
    rows, failures = _evaluate_missing(store, checkpoints, wanted, measures, seeds, (cpus, gpus))
    _print_table(rows, as_json)
    _store_rows_for_reports(checkpoints, rows)
    _exit_with_failures(failures)


def _parse_step_options(given: list[str] | None) -> list[int] | None:
    """Return the steps given by `--step`: None for all checkpoints, empty for the newest."""
    if given == ["all"]:
        return None
    wrong = [step for step in given or () if not step.isdecimal()]
    if wrong:
        raise OptionError(
            f"--step {wrong[0]} is not a number of steps",
            remedy="give a number, or only `all` for every checkpoint",
        )
    return [int(step) for step in given or ()]


def _select_tasks(suite: str, data: str | None, task_names: list[str] | None) -> "list[Task]":
    """Return the suite's tasks, or only those in `task_names`.

    Raises:
        TaskError: there is no such suite.
        OptionError: the suite has no task of one of the `task_names`.
    """
    known = {task.name: task for task in _load_suite_tasks(suite, data)}
    unknown = [name for name in task_names or () if name not in known]
    if unknown:
        raise OptionError(f"--task {unknown[0]}: {suite} has no such task", remedy=f"its tasks: {', '.join(known)}")
    return [task for task in known.values() if not task_names or task.name in task_names]


def _load_suite_tasks(suite: str, data: str | None) -> "tuple[Task, ...]":
    from launcher.after.tasks.suite import load_suite

    is_file = suite.endswith((".yaml", ".yml"))  # a local folder may have the name of a bundled suite
    return load_suite(
        _absolute_place(suite) if is_file else suite,
        None if data is None else _absolute_place(data),
    )


def _absolute_place(place: str) -> str:
    """Return a local path as an absolute one, so that processes in other folders find it."""
    from pathlib import Path

    return str(Path(place).absolute()) if Path(place).exists() else place


def _select_cells(
    cells: "Sequence[Cell]", sources: list[str], steps: list[int] | None, task_names: list[str]
) -> "list[Cell]":
    """Return the grid cells of these checkpoints and tasks, in the order of the table."""
    places = {source.rstrip("/"): number for number, source in reversed(list(enumerate(sources)))}
    selected = [
        cell
        for cell in cells
        if cell.source.rstrip("/") in places
        and (not steps or cell.step is None or cell.step in steps)
        and cell.task in task_names
    ]

    def table_order(cell: "Cell") -> tuple[object, ...]:
        return places[cell.source.rstrip("/")], cell.step or 0, task_names.index(cell.task), cell.measure, cell.seed

    return sorted(selected, key=table_order)


def _evaluate_missing(
    store: "Store",
    sources: list[str],
    steps: list[int] | None,
    measures: "list[MeasureSpec]",
    seed_count: int,
    cell_resources: tuple[float, float | None],
) -> "tuple[list[TableRow], list[CellFailure]]":
    """Compute the grid cells without a result, and store each result at once. Return the table, and the failures."""
    from contextlib import ExitStack

    from launcher.after.evaluate.cells import find_results, plan_cells, store_result, tabulate_results
    from launcher.after.evaluate.grid import CellFailure, CellResources, compute_cells
    from launcher.after.evaluate.measures import find_contamination_searches
    from launcher.after.evaluate.model import find_models

    failures, models = list[CellFailure](), find_models(sources, steps)
    works = plan_cells(models, measures, range(seed_count))
    keys = {work.cell.key for work in works}
    found = find_results(store, keys)
    missing = list({work.cell.key: work for work in works if work.cell.key not in found}.values())
    _say(f"{len(keys)} cells: {len(found)} have results, {len(missing)} to compute")
    searched, needed = find_contamination_searches(missing), {work.cell.weights for work in missing}
    with ExitStack() as stack:
        files = {model.digest: stack.enter_context(model.open()) for model in models if model.digest in needed}
        with work("computing", len(missing), "cells") as now:
            for ended, outcome in compute_cells(missing, files, CellResources(*cell_resources)) if missing else ():
                if isinstance(outcome, CellFailure):
                    failures.append(outcome)
                else:
                    store_result(store, ended, outcome, searched[ended.cell.key])
                now.advance()
                _say(outcome.problem if isinstance(outcome, CellFailure) else ended.cell.name)
    return tabulate_results([work.cell for work in works], find_results(store, keys)), failures


def _store_rows_for_reports(sources: list[str], table: "list[TableRow]") -> None:
    """Store each run's rows of the table with the run, for `maskfleet report`. Called after the table is printed."""
    from data_service.store.errors import StoreError
    from data_service.store.open import open_store
    from launcher.observe.inspect.report.task_table import store_rows
    from launcher.runtime.run.record import RECORD_FILE

    for source in sources if table else ():
        try:
            store = open_store(source)
            if store.size(RECORD_FILE) is not None:
                store_rows(store, [row for row in table if row.checkpoint == source])
        except StoreError as error:
            _say(f"the report of {source} will lack this table: {error.problem}")


def _exit_with_failures(failures: "Sequence[CellFailure]") -> None:
    """Print the failures, if any, and exit with their code."""
    from launcher.exit_codes import MISTAKE, REPEAT

    for failure in failures:
        _say(f"failed: {failure.problem}\n  {failure.remedy}")
        if failure.trace:
            _say(failure.trace.rstrip())
    if any(failure.is_transient for failure in failures):
        _say("run the same command to continue: computed results are kept")
        raise typer.Exit(REPEAT)
    if failures:
        raise typer.Exit(MISTAKE)


def _print_table(rows: "list[TableRow]", as_json: bool) -> None:
    from launcher.observe.inspect.report.task_table import searched_note, terminal_table
    from launcher.output import print_table

    if as_json:
        print_json(row.model_dump(mode="json") for row in rows)
    else:
        print_table(terminal_table(rows))
        if note := searched_note(rows):
            typer.echo(note)
