"""`maskfleet runs`: shows the state of runs, stops a run, and forks a new run from a checkpoint."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from data_service.printable import shell_word
from launcher.app.cli.options import (
    RunArgument,
    StepOption,
    print_json,
    require_assignments,
    require_new_run,
    require_run,
)
from launcher.app.cli.recipe import SetOption
from launcher.errors import OptionError

if TYPE_CHECKING:
    from launcher.observe.inspect.document_selection import DocumentSelection
    from launcher.runtime.run.record import Run

group = typer.Typer(no_args_is_help=True, help="Show the state of runs, stop or fork a run, find the data it reads.")


@group.command()
def status(
    places: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, or folders of runs, local or s3://.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for each run.")] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Read only the newest metrics, which is fast even for long runs.")
    ] = False,
) -> None:
    """Show what a run is doing. Only the run's store is read, so the command works on any machine with access to it.

    For one run, print everything: where it runs, its progress, checkpoints, and (unless `--brief`) interruptions and
    goodput. For several runs, or a folder of runs, print one line each; exit code 1 if a run cannot be read.

    Example: `maskfleet runs status s3://bucket/runs`
    """
    from dataclasses import asdict

    from data_service.printable import escape_controls
    from launcher.observe.inspect.status import RunStatus, UnreadableRun, read_statuses, status_lines, status_table
    from launcher.output import print_table

    now = time.time()
    found = list(read_statuses(places, now, brief=brief))
    unreadable = [one for one in found if isinstance(one, UnreadableRun)]
    if as_json:
        for one in found:
            origins = [origin.model_dump() for origin in one.origins] if isinstance(one, RunStatus) else []
            print_json([asdict(one) | {"origins": origins}])
    elif len(found) == 1 and isinstance(found[0], RunStatus):
        for line in status_lines(found[0], now):
            typer.echo(escape_controls(line))
    else:
        print_table(status_table(found, now))
    for one in unreadable:
        typer.echo(escape_controls(f"{one.uri}: {one.problem}"), err=True)
    if unreadable:
        raise typer.Exit(1)


@group.command()
def watch(
    run: RunArgument,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Anyone who can reach it can read the run.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8643,
) -> None:
    """Serve the report as a live page, which is redrawn as records arrive.

    Nothing is written to the run, and nothing is loaded from elsewhere. Ctrl-C ends it.

    Example: `maskfleet runs watch runs/first`
    """
    import os
    import sys
    from tempfile import TemporaryDirectory

    from data_service.store.open import open_store
    from launcher.observe.watch.live import make_caching_store, require_one_run
    from launcher.observe.watch.site import PageServer, Site, serve

    store = open_store(run, patience_s=10.0)  # a short patience, so that the page soon says that it waits for the store
    require_one_run(run, store)
    with TemporaryDirectory(prefix="maskfleet-watch-", ignore_cleanup_errors=True) as folder:
        site = Site(run, make_caching_store(store, folder))
        serve(PageServer(site, host, port), lambda url: typer.echo(f"{run} is shown at {url}"))
    sys.stdout.flush()
    os._exit(0)  # does not wait for threads that read from a store that does not answer


@group.command()
def stop(
    run: RunArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the run has ended.")] = False,
) -> None:
    """Ask a run to commit a checkpoint and end with code 3, wherever it runs. Schedulers do not restart it after that.

    The request is stored with the run, and applies only to the `maskfleet train` that runs now; a later one continues
    the run as usual.
    """
    from launcher.observe.inspect.status import not_running_reason, read_status
    from launcher.runtime.run import request_stop as run_stop
    from launcher.runtime.run.outline import open_outline

    opened = open_outline(run)
    asked = run_stop.ask_to_stop(opened.store, time.time())
    if asked is None or asked.state != "running":
        typer.echo(f"{run} {not_running_reason(asked)}: nothing to stop")
        return
    where = f"{asked.owner.host}, process {asked.owner.pid}"
    typer.echo(f"asked the run on {where} to stop; it saves after its present step")
    if wait:
        run_stop.wait_for_end(opened.store, asked, time.time)
        ended = read_status(opened, time.time(), brief=True)
        typer.echo(f"{ended.state} at step {ended.step:,} of {ended.total_steps:,}")


@group.command()
def fork(
    run: RunArgument,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Folder or s3:// URI of the new run.")],
    step: StepOption = None,
    assignments: SetOption = None,
    decay: Annotated[
        int | None,
        typer.Option(
            "--decay",
            min=1,
            metavar="STEPS",
            help="End the new run after this many more steps, during which the learning rate decays.",
        ),
    ] = None,
    keep_position: Annotated[
        bool,
        typer.Option("--keep-position", help="Keep the position in the data even if the new run's data differs."),
    ] = False,
) -> None:
    """Create a run that continues from a checkpoint of RUN: its weights, moments and step, with changed settings.

    The data continues where RUN's would have, if both runs have the same data up to there; with another corpus, batch,
    row length or seed it starts over. The model cannot change. The checkpoint is copied, so RUN may be deleted later.

    `--decay 5000` ends a run from any checkpoint of a stable phase, by its schedule's decay, or else by 1 - sqrt.

    Example: `maskfleet runs fork s3://bucket/runs/base s3://bucket/runs/slower --step 9000 --set
    optimizer.adamw.lr=1e-4`
    """
    require_assignments(assignments or ())
    require_run(run)
    require_new_run(new)
    from datetime import UTC, datetime

    from launcher.runtime.run import fork as forking
    from launcher.runtime.run.record import open_run

    made = forking.fork(
        open_run(run),
        new,
        step,
        assignments or (),
        keep_position=keep_position,
        now=datetime.now(UTC),
        decay=decay,
    )
    typer.echo(f"created {made.run.recipe.name} at {new} from step {made.step:,} of {run}")
    for line in made.changes:
        typer.echo(f"  {line}")
    why = f"starts over ({', '.join(made.restarted)})" if made.restarted else "continues where it was"
    typer.echo(f"its data {why}")
    typer.echo(f"next: maskfleet train {shell_word(new)}")


@group.command()
def exposure(
    run: RunArgument,
    document: Annotated[
        list[str] | None,
        typer.Option(
            "--document",
            metavar="SOURCE:NUMBER",
            help="A training document: the name of its source in the recipe, and its number in "
            "`maskfleet corpus show --index`. Repeatable.",
        ),
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option("--ids", metavar="FILE", help="File of document ids, one per line, looked up in all sources."),
    ] = None,
    removed: Annotated[
        bool, typer.Option("--removed", help="All documents that were removed from the run's corpora.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for each row.")] = False,
) -> None:
    """Show every step and row that trains on documents, or that none does. The rows are computed from the documents'
    positions, so the time depends on the number of rows found, not on the number of steps.

    Finished, running and future runs are covered. Steps that a run undid when it went back are listed as undone. Rows
    that leave a document out, because it was removed, are counted but not listed.

    Example: `maskfleet runs exposure s3://bucket/runs/base --document news:81023`
    """
    require_run(run)
    named = [_parse_document_option(text) for text in document or ()]
    if (bool(named), ids is not None, removed).count(True) != 1:
        raise OptionError(
            "name the documents in one way",
            remedy="give one of --document, --ids and --removed",
        )
    from dataclasses import asdict

    from launcher.observe.inspect.exposure import exposure_table, find_exposures, summary_lines
    from launcher.output import print_table
    from launcher.progress import work
    from launcher.runtime.run.record import open_run

    opened = open_run(run)
    selection = _select_documents(opened, named, ids)
    with work("finding rows", len(selection.places) * len(opened.recipe.phases), "documents") as now:
        report = find_exposures(opened, selection, now.advance)
    if as_json:
        print_json(asdict(each) | {"document": str(each.document)} for each in report.found)
        return
    if report.found:
        print_table(exposure_table(report))
    for line in summary_lines(report):
        typer.echo(line)


def _select_documents(run: "Run", named: list[tuple[str, int]], ids: str | None) -> "DocumentSelection":
    """Return the documents in `named`, or else those with the ids in a file, or else all removed documents."""
    from launcher.app.cli.texts import read_nonblank_lines
    from launcher.observe.inspect.document_selection import (
        DocumentName,
        documents_by_id,
        documents_by_number,
        removed_documents,
    )
    from launcher.progress import work

    if named:
        return documents_by_number(run, [DocumentName(*each) for each in named])
    if ids is None:
        return removed_documents(run)
    wanted = read_nonblank_lines(ids)
    with work("finding documents", unit="sidecars") as now:
        return documents_by_id(run, wanted, lambda more, total: now.advance(more))


def _parse_document_option(text: str) -> tuple[str, int]:
    source, _, number = text.rpartition(":")
    if not source or not number.isdecimal():
        raise typer.BadParameter(f"{text!r} is not SOURCE:NUMBER, as in news:81023", param_hint="--document")
    return source, int(number)
