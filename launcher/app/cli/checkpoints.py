"""`maskfleet checkpoints`: list, verify, export, average."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.options import JsonOption, LicenceOption, RunArgument, StepOption, print_json, require_run
from launcher.errors import OptionError

if TYPE_CHECKING:
    from checkpoints.verify import ReportBytes, Verification
    from launcher.after.export.export import ExportResult
    from launcher.after.onnx.graph import OnnxGraph

OutOption = Annotated[str, typer.Option("--out", help="Folder or s3:// URI for the exported model.")]

group = typer.Typer(no_args_is_help=True, help="List, verify, export and average a run's checkpoints.")


@group.command("list")
def list_checkpoints(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the run's checkpoints, newest first."""
    from dataclasses import asdict

    from rich.table import Table

    from checkpoints.listing import checkpoint_rows
    from launcher.observe.inspect.report.events import utc_text
    from launcher.output import human_bytes, print_table
    from launcher.runtime.run.outline import open_outline

    found = checkpoint_rows(open_outline(run).store)
    if as_json:
        print_json(asdict(row) for row in found)
        return
    table = Table("step", "committed (UTC)", "attempt", "ranks", "size", "", box=None, pad_edge=False)
    for row in found:
        when = "" if row.created is None else utc_text(row.created)
        abandoned = "abandoned: the run went on from an earlier one" if row.abandoned else ""
        ranks = "" if row.world_size is None else str(row.world_size)
        size = human_bytes(row.bytes)
        table.add_row(f"{row.step:,}", when, str(row.attempt), ranks, size, row.problem or abandoned)
    print_table(table)


@group.command()
def verify(
    run: RunArgument,
    quick: Annotated[bool, typer.Option("--quick", help="Check only that files exist and have their size.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every byte of every checkpoint against its manifest. Exit code 1 if a checkpoint is damaged."""
    from checkpoints.verify import verify_all
    from launcher.progress import BYTES_UNIT, work
    from launcher.runtime.run.outline import open_outline

    store = open_outline(run).store
    damaged = 0
    with work("verifying", unit=BYTES_UNIT) as now:

        def begin(step: int, size: int) -> "ReportBytes":
            now.begin_part(f"verifying step {step:,}", size)
            return now.advance

        for report in verify_all(store, full=not quick, begin=begin):
            if as_json:
                print_json([_verified_record(report)])
            else:
                typer.echo(f"step {report.name.step:,}: {'DAMAGED' if report.problems else 'good'}")
                for problem in report.problems:
                    typer.echo(f"  {problem}")
            damaged += bool(report.problems)
    if damaged:
        raise typer.Exit(1)


def _verified_record(report: "Verification") -> dict[str, object]:
    return {"step": report.name.step, "attempt": report.name.attempt, "problems": report.problems}


@group.command()
def export(
    run: RunArgument,
    out: OutOption,
    step: StepOption = None,
    average: Annotated[
        bool, typer.Option("--average", help="Export the average of the weights that the run keeps (average.ema).")
    ] = False,
    licence: LicenceOption = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Add onnx/model.onnx, for servers; needs maskfleet[onnx].")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="With --onnx: also add onnx/model_quantized.onnx, with 8-bit weights.")
    ] = False,
) -> None:
    """Export the model in the transformers format: safetensors, config.json, tokenizer files and a model card.

    The export is read back and compared bit for bit. Files of an earlier export in the folder are replaced; a folder
    that holds anything else is refused.

    Example: `maskfleet checkpoints export s3://bucket/runs/base --out base-hf/`
    """
    require_run(run)
    if int8 and not onnx:
        raise OptionError("--int8 needs --onnx", remedy="add --onnx: the 8-bit graph is made from the ONNX graph")
    from launcher.after.export.export import export_run
    from launcher.runtime.run.record import open_run

    graphs: list[OnnxGraph] = []
    if onnx:
        from launcher.after.onnx.graph import require_onnx_packages

        require_onnx_packages()

    def add_onnx(folder: Path) -> None:
        if onnx:
            from launcher.after.onnx.graph import write_graph

            graphs.append(write_graph(folder, int8=int8))

    exported = export_run(open_run(run), step, out, licence=licence, average=average, add_files=add_onnx)
    _print_exported(exported, f"{'the average at ' if average else ''}step {exported.step:,}", out)
    for graph in graphs:
        typer.echo(f"  {graph}")


@group.command()
def average(
    run: RunArgument,
    out: OutOption,
    last: Annotated[int | None, typer.Option("--last", min=2, help="Number of newest checkpoints.")] = None,
    steps: Annotated[str | None, typer.Option("--steps", metavar="N,N,...", help="Steps of the checkpoints.")] = None,
    licence: LicenceOption = None,
) -> None:
    """Export the mean of the weights of several checkpoints, computed in float64.

    The folder is like that of `export`, so a new run can start from it (`--set start=FOLDER`). Its mean.json lists the
    checkpoints and their digests.

    Example: `maskfleet checkpoints average runs/base --last 5 --out base-mean/`
    """
    if (last is None) == (steps is None):
        raise typer.BadParameter("give --last or --steps, exactly one of the two", param_hint="--last")
    numbers = _parse_steps(steps) if steps is not None else []
    require_run(run)
    from launcher.after.export.export import checkpoints_at_steps, export_mean, newest_checkpoints
    from launcher.runtime.run.record import open_run

    opened = open_run(run)
    chosen = checkpoints_at_steps(opened, numbers) if last is None else newest_checkpoints(opened, last)
    exported = export_mean(opened, chosen, out, licence=licence)
    _print_exported(exported, f"the mean of steps {', '.join(f'{manifest.step:,}' for manifest in chosen)}", out)


def _parse_steps(steps: str) -> list[int]:
    parts = steps.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"{steps!r} is not a list of steps, as in 8000,9000", param_hint="--steps")
    return [int(part) for part in parts]


def _print_exported(exported: "ExportResult", what: str, out: str) -> None:
    typer.echo(f"exported {what} to {out}")
    for folder, architecture in exported.models.items():
        known = f"for transformers' {architecture}" if architecture else "transformers has no class for it"
        typer.echo(f"  {folder}  {known}")
    if exported.left_out:
        typer.echo(f"  left out, because the format has no place for it: {', '.join(exported.left_out)}")
