"""`maskfleet tasks`: lists, shows and checks tasks and suites."""

from typing import TYPE_CHECKING, Annotated

import typer

from data_service.printable import visible
from launcher.app.cli.options import DataOption, JsonOption, print_json

if TYPE_CHECKING:
    from launcher.after.tasks.summary import SplitSummary
    from launcher.after.tasks.task import Task

group = typer.Typer(no_args_is_help=True, help="List, show and check tasks and suites.")

TaskArgument = Annotated[
    str, typer.Argument(metavar="TASK", help="A task's or suite's name, or a YAML file.")
]


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="tasks", rich_help_panel="Prepare")


@group.command("list")
def list_tasks(as_json: JsonOption = False) -> None:
    """List the tasks and suites that come with Maskfleet."""
    from rich.table import Table

    from launcher.after.tasks.suite import bundled_suites, read_suite
    from launcher.after.tasks.task import bundled_tasks, load_task
    from launcher.output import print_table

    tasks = [load_task(name) for name in bundled_tasks()]
    found = [suite for name in bundled_suites() if (suite := read_suite(name)) is not None]
    suites = {suite.name: [entry.task for entry in suite.entries] for suite in found}
    if as_json:
        print_json(_described(task, suites) for task in tasks)
        return
    table = Table("task", "kind", "metrics", "what it is", box=None, pad_edge=False)
    for task in sorted(tasks, key=lambda task: (task.kind, task.name)):
        table.add_row(task.name, task.kind, ", ".join(task.metrics), task.about)
    print_table(table)
    typer.echo("\nsuites")
    for name, members in suites.items():
        typer.echo(f"  {name}: {', '.join(members)}")


def _described(task: "Task", suites: dict[str, list[str]]) -> dict[str, object]:
    return {
        "name": task.name,
        "kind": task.kind,
        "about": task.about,
        "metrics": task.metrics,
        "splits": task.splits,
        "after": task.after,
        "published": task.published,
        "suites": [suite for suite, members in suites.items() if task.name in members],
    }


@group.command()
def show(task: TaskArgument) -> None:
    """Print a task or a suite as written, with its comments.

    Start your own from a bundled one: `maskfleet tasks show sst2 > mine.yaml`.
    """
    from launcher.after.tasks.suite import bundled_suites, load_suite
    from launcher.after.tasks.task import bundled_tasks, read_yaml

    load_suite(task)
    bundled = {**bundled_tasks(), **bundled_suites()}
    typer.echo(visible(bundled[task] if task in bundled else read_yaml(task)), nl=False)


@group.command()
def check(task: TaskArgument, data: DataOption = None, as_json: JsonOption = False) -> None:
    """Read all of a task, or of a suite's tasks, and say what is in it: examples, labels, repetitions.

    The first mistake in a task's files ends it, with file and line; a suite's other tasks are checked all the same.
    """
    from data_service.errors import InputError, UserError
    from launcher.after.tasks.suite import load_suite
    from launcher.after.tasks.summary import summarise
    from launcher.errors import TaskError

    tasks = load_suite(task, data)
    mistakes: list[UserError] = []
    for loaded in tasks:
        try:
            for summary in summarise(loaded):
                _say(loaded, summary, as_json)
        except (TaskError, InputError) as error:
            mistakes.append(error)
    if mistakes:
        raise TaskError(
            "\n".join(error.problem for error in mistakes),
            remedy="\n".join(dict.fromkeys(error.remedy for error in mistakes)),
        )


def _say(task: "Task", summary: "SplitSummary", as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        print_json([{"task": task.name, **asdict(summary)}])
        return
    twice = f"; {summary.repeated:,} repeat another" if summary.repeated else ""
    leaked = f"; {summary.in_train:,} are in train, too" if summary.in_train else ""
    typer.echo(
        visible(
            f"{task.name} {summary.split}: {summary.examples:,} examples, {summary.labels}; characters: median "
            f"{summary.median_length:,}, longest {summary.longest:,}{twice}{leaked}; {summary.digest[:12]}"
        )
    )
