"""`maskfleet preflight`: what every node checks before its ranks train, by hand."""

from typing import Annotated

import typer

from launcher.commands.options import JsonOption, print_json


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Look after it")(preflight)


def preflight(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|RECIPE]", help="The run to be trained here, or a recipe of which to make one."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this node as `train` does before it begins: memory, /dev/shm, limits, GPUs, stores, clock, room.

    Takes three seconds at most. Exit code 1 if something would keep ranks from this node.

    Example: `maskfleet preflight s3://bucket/runs/base`
    """
    from launcher.commands.doctor import table_of
    from launcher.output import print_table
    from launcher.preflight.findings import worst
    from launcher.preflight.measure import examine, raise_open_files, subject

    raise_open_files()
    findings = examine(subject(target) if target is not None else None)
    if as_json:
        print_json(vars(finding) for finding in findings)
    else:
        print_table(table_of(findings))
    if worst(findings) == "failure":
        raise typer.Exit(1)
