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

group = typer.Typer(no_args_is_help=True, help="See how runs stand, stop one, fork one, find what they read.")


@group.command()
def status(
    places: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, or folders of runs, local or s3://.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run and line.")] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Read the newest metrics only: at once, even for a run of weeks.")
    ] = False,
) -> None:
    """Show what a run is doing. It reads the run's store only, so any machine with access can ask.

    For one run, everything: where it runs, its progress, checkpoints, interruptions and goodput (these two not with
    `--brief`). For several, or a folder of runs, a line each; code 1 if one of them cannot be read.

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
        str, typer.Option("--host", help="Address to listen on. Whoever reaches it can read the run.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8643,
) -> None:
    """Serve the report as a live page, drawn again as records come.

    Nothing is written to the run, and nothing is loaded from elsewhere. Ctrl-C ends it.

    Example: `maskfleet runs watch runs/first`
    """
    import os
    import sys
    from tempfile import TemporaryDirectory

    from data_service.store.open import open_store
    from launcher.observe.watch.live import make_caching_store, require_one_run
    from launcher.observe.watch.site import PageServer, Site, serve

    store = open_store(run, patience_s=10.0)  # seconds of patience: a page that waits for the store says so
    require_one_run(run, store)
    with TemporaryDirectory(prefix="maskfleet-watch-", ignore_cleanup_errors=True) as folder:
        site = Site(run, make_caching_store(store, folder))
        serve(PageServer(site, host, port), lambda url: typer.echo(f"{run} is shown at {url}"))
    sys.stdout.flush()
    os._exit(0)  # ends without waiting for reads of a store that does not answer


@group.command()
def stop(
    run: RunArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Come back when it has ended.")] = False,
) -> None:
    """Ask a run to commit a checkpoint and end with code 3, wherever it runs; no scheduler starts it again on that.

    The request goes through the run's store, and is for the start that runs now: `maskfleet train` continues the run
    as ever.
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
    typer.echo(f"asked the start on {where} to stop; it saves after its present step")
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
            help="End the new run so many steps later, and let the learning rate decay in them.",
        ),
    ] = None,
    keep_position: Annotated[
        bool,
        typer.Option("--keep-position", help="Go on at the step's place in the data, though it is other data."),
    ] = False,
) -> None:
    """Create a run that goes on from a checkpoint of another: its weights, moments and step, with changed settings.

    The data goes on where the other run would have, if up to there it is the same; with another corpus, batch, row
    length or seed it begins anew. The model stays. The checkpoint is copied: RUN may be deleted afterwards.

    `--decay 5000` ends a run at any checkpoint of a stable stretch, by its schedule's decay, or 1 - sqrt without one.

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
    why = f"begins anew ({', '.join(made.restarted)})" if made.restarted else "goes on where it was"
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
            help="A training document, by the name of its source in the recipe and its number in "
            "`maskfleet corpus show --index`. May be repeated.",
        ),
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option("--ids", metavar="FILE", help="Documents by id, one a line, in all sources that know ids."),
    ] = None,
    removed: Annotated[
        bool, typer.Option("--removed", help="All documents that were removed from the run's corpora.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row and line.")] = False,
) -> None:
    """Show every step and row that trains on documents, or that none does. It is computed from the documents'
    places: it takes as long as there are rows to name, however many steps the run has.

    It holds for finished, running and future runs. Steps that a run went back from are listed, as undone. Rows that
    leave a document out, because it was removed, are counted and not listed.

    Example: `maskfleet runs exposure s3://bucket/runs/base --document news:81023`
    """
    require_run(run)
    named = [_parse_document_option(text) for text in document or ()]
    if (bool(named), ids is not None, removed).count(True) != 1:
        raise OptionError(
            "no documents are named, or in more than one way",
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
    """Return the documents that are named by number, else by the ids of a file, else all that were removed."""
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
