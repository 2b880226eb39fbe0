"""`maskfleet checkpoints`: list, verify, export."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.options import (
    JsonOption,
    LicenceOption,
    RunArgument,
    StepOption,
    print_json,
    require_run,
)

if TYPE_CHECKING:
    from checkpoints.verify import ReportBytes, Verification

group = typer.Typer(no_args_is_help=True, help="List, verify and export a run's checkpoints.")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="checkpoints", rich_help_panel="Look after it")


@group.command("list")
def list_checkpoints(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the run's checkpoints, newest first."""
    from dataclasses import asdict

    from rich.table import Table

    from checkpoints.listing import checkpoint_rows
    from launcher.output import human_bytes, print_table
    from launcher.runtime.run.outline import open_outline

    found = checkpoint_rows(open_outline(run).store)
    if as_json:
        print_json(asdict(row) for row in found)
        return
    table = Table("step", "committed (UTC)", "attempt", "ranks", "size", "", box=None, pad_edge=False)
    for row in found:
        when = "" if row.created is None else f"{datetime.fromtimestamp(row.created, UTC):%Y-%m-%d %H:%M:%S}"
        abandoned = "abandoned: the run went on from an earlier one" if row.abandoned else ""
        ranks = "" if row.world_size is None else str(row.world_size)
        size = human_bytes(row.bytes)
        table.add_row(f"{row.step:,}", when, str(row.attempt), ranks, size, row.problem or abandoned)
    print_table(table)


@group.command()
def verify(
    run: RunArgument,
    quick: Annotated[bool, typer.Option("--quick", help="Files and sizes only, not every byte.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every checkpoint against its manifest, every byte of it. Exit code 1 if one is damaged."""
    from checkpoints.verify import verify_all
    from launcher.progress import BYTES, work
    from launcher.runtime.run.outline import open_outline

    store = open_outline(run).store
    damaged = 0
    with work("verifying", unit=BYTES) as now:

        def begin(step: int, size: int) -> "ReportBytes":
            now.begin(f"verifying step {step:,}", size)
            return now.advance

        for report in verify_all(store, full=not quick, begin=begin):
            if as_json:
                print_json([_verified(report)])
            else:
                typer.echo(f"step {report.mark.step:,}: {'DAMAGED' if report.problems else 'good'}")
                for problem in report.problems:
                    typer.echo(f"  {problem}")
            damaged += bool(report.problems)
    if damaged:
        raise typer.Exit(1)


def _verified(report: "Verification") -> dict[str, object]:
    return {"step": report.mark.step, "attempt": report.mark.attempt, "problems": report.problems}


@group.command()
def export(
    run: RunArgument,
    out: Annotated[str, typer.Option("--out", help="Folder or s3:// URI for the exported model.")],
    step: StepOption = None,
    licence: LicenceOption = None,
) -> None:
    """Write the model as `transformers` loads it: safetensors, config.json, the tokenizer's files and a model card.

    What was written is read back and compared bit for bit. Files of a former export in the folder are replaced; a
    folder that holds anything else is refused.

    Example: `maskfleet checkpoints export s3://bucket/runs/base --out base-hf/`
    """
    require_run(run)
    from launcher.after.export.export import export_run
    from launcher.runtime.run.record import open_run

    exported = export_run(open_run(run), step, out, licence=licence)
    typer.echo(f"exported step {exported.step:,} to {out}")
    for folder, architecture in exported.models.items():
        known = f"for transformers' {architecture}" if architecture else "transformers has no class for it"
        typer.echo(f"  {folder}  {known}")
    if exported.left_out:
        typer.echo(f"  left out, since an export has no place for it: {', '.join(exported.left_out)}")
