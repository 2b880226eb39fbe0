"""`maskfleet tasks`: lists, shows and checks tasks and suites."""

from typing import TYPE_CHECKING, Annotated

import typer

from data_service.printable import escape_controls
from launcher.app.cli.options import DataOption, JsonOption, TextFieldOption, print_json
from launcher.errors import OptionError

if TYPE_CHECKING:
    from launcher.after.tasks.summary import SplitSummary
    from launcher.after.tasks.task import Task

group = typer.Typer(no_args_is_help=True, help="List, show and check tasks and suites.")

TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="A task's or suite's name, or a YAML file.")]


@group.command("list")
def list_tasks(as_json: JsonOption = False) -> None:
    """List the tasks and suites that come with Maskfleet."""
    from rich.table import Table

    from launcher.after.tasks.suite import bundled_suites, read_suite
    from launcher.after.tasks.task import bundled_tasks, load_task
    from launcher.output import print_table

    tasks = [load_task(name) for name in bundled_tasks()]
    found = [suite for name in bundled_suites() if (suite := read_suite(name)) is not None]
    suites = {suite.name: [entry.task for entry in suite.suite_entries] for suite in found}
    if as_json:
        print_json(_task_record(task, suites) for task in tasks)
        return
    table = Table("task", "kind", "metrics", "what it is", box=None, pad_edge=False)
    for task in sorted(tasks, key=lambda task: (task.kind, task.name)):
        table.add_row(task.name, task.kind, ", ".join(task.metrics), task.about)
    print_table(table)
    typer.echo("\nsuites")
    for name, members in suites.items():
        typer.echo(f"  {name}: {', '.join(members)}")


def _task_record(task: "Task", suites: dict[str, list[str]]) -> dict[str, object]:
    return {
        "name": task.name,
        "kind": task.kind,
        "about": task.about,
        "metrics": task.metrics,
        "splits": task.splits,
        "published": task.published,
        "suites": [suite for suite, members in suites.items() if task.name in members],
    }


@group.command()
def show(task: TaskArgument) -> None:
    """Print a task or a suite as written, with its comments.

    To write your own, start from a bundled one: `maskfleet tasks show sst2 > mine.yaml`.
    """
    from launcher.after.tasks.suite import bundled_suites, load_suite
    from launcher.after.tasks.task import bundled_tasks, read_yaml

    load_suite(task)
    bundled = {**bundled_tasks(), **bundled_suites()}
    typer.echo(escape_controls(bundled[task] if task in bundled else read_yaml(task)), nl=False)


@group.command()
def check(task: TaskArgument, data: DataOption = None, as_json: JsonOption = False) -> None:
    """Read all files of a task or of a suite's tasks, and print their numbers of examples, labels and repetitions.

    The check of a task stops at the first mistake, with file and line; a suite's other tasks are still checked.
    """
    from data_service.errors import InputError, UserError
    from launcher.after.tasks.suite import load_suite
    from launcher.after.tasks.summary import summarise_splits
    from launcher.errors import TaskError

    tasks = load_suite(task, data)
    mistakes: list[UserError] = []
    for loaded in tasks:
        try:
            for summary in summarise_splits(loaded):
                _print_summary(loaded, summary, as_json)
        except (TaskError, InputError) as error:
            mistakes.append(error)
    if mistakes:
        raise TaskError(
            "\n".join(error.problem for error in mistakes),
            remedy="\n".join(dict.fromkeys(error.remedy for error in mistakes)),
        )


@group.command()
def ngrams(
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="The index to write.")],
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="TASK...", help="Names of tasks or suites, or YAML files.")
    ] = None,
    data: DataOption = None,
    files: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="FILE", help="Also index a file that `corpus build` reads. Repeatable."),
    ] = None,
    text_field: TextFieldOption = "text",
    as_json: JsonOption = False,
) -> None:
    """Index the texts of all labelled splits but `train`, for the stage `decontaminate` of `maskfleet corpus prepare`.

    The index has n-grams of 13 words, and whole texts of 8 to 12 words; of a retrieval task, only queries. Prints the
    SHA-256 that the stage needs, and how many texts of each split can be looked up.

    Example: `maskfleet tasks ngrams sst2 stsb --data glue/ --out glue.ngrams`
    """
    from hashlib import sha256

    from data_service.prepare.contamination import build_index, dump_index
    from data_service.store.open import open_store_of_file
    from launcher.after.tasks.suite import load_suite
    from launcher.after.tasks.summary import texts_of_file, texts_of_task
    from launcher.progress import work

    if not tasks and not files:
        raise OptionError("there is nothing to index", remedy="give tasks, or files by --file")
    loaded = [task for name in tasks or () for task in load_suite(name, data)]
    with work("reading evaluation texts"):
        texts = [text for task in loaded for text in texts_of_task(task)]
        texts += [text for file in files or () for text in texts_of_file(file, text_field)]
        index = build_index(texts)
        content = dump_index(index)
    store, name = open_store_of_file(out)
    store.put(name, content)
    digest = sha256(content).hexdigest()
    if as_json:
        print_json([{"sha256": digest, **split.model_dump()} for split in index.splits])
        return
    for split in index.splits:
        typer.echo(escape_controls(f"{split.split}: {split.looked_up:,} of {split.texts:,} texts can be looked up"))
    typer.echo(escape_controls(f"wrote {out}: {len(index.keys):,} n-grams, sha256 {digest}"))


def _print_summary(task: "Task", summary: "SplitSummary", as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        print_json([{"task": task.name, **asdict(summary)}])
        return
    twice = f"; {summary.repeated:,} repeat another" if summary.repeated else ""
    leaked = f"; {summary.in_train:,} are in train, too" if summary.in_train else ""
    typer.echo(
        escape_controls(
            f"{task.name} {summary.split}: {summary.examples:,} examples, {summary.labels}; characters: median "
            f"{summary.median_length:,}, longest {summary.longest:,}{twice}{leaked}; {summary.digest[:12]}"
        )
    )
