"""`maskfleet burnin`: checks a new machine and measures what it reaches."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.options import JsonOption, print_json, require_recipe

if TYPE_CHECKING:
    from launcher.plan.burnin.check import Check


def register(app: typer.Typer) -> None:
    app.command("burnin", rich_help_panel="Look after it")(burnin)


def burnin(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]", help="Whose networks are tried and timed. Default: four that differ most."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for burnin.html, burnin.json and compiled code.")] = Path(
        "maskfleet-burnin"
    ),
    minutes: Annotated[
        float | None, typer.Option(help="Do what fits into so many. Default: all checks.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Do this check, or all whose names begin so. May be given several times."),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Small shapes on the CPU, as where there is no GPU.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the checks, and do none.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a new GPU machine: kernels, training, memory, checkpoints, collectives and speed, in about 25 minutes.

    Each check runs in a process of its own, so one that crashes or hangs ends alone. The page and its JSON are written
    after each. Given again, the command goes on with what is left and what failed. Exit code 1 if something is wrong.

    Example: `maskfleet burnin --minutes 25`
    """
    if recipe is not None:
        require_recipe(recipe)
    from launcher.plan.burnin.checks import DEFAULT_RECIPES, checks_for
    from launcher.plan.burnin.session import BurninRequest, burn_in

    checks = _chosen(checks_for(recipe), only)
    if listed:
        _print_list(checks, as_json)
        return
    recipes = DEFAULT_RECIPES if recipe is None else (recipe,)
    wanted = BurninRequest(checks, recipes, out, minutes, "cpu" if tiny else None, named=only is not None)
    found = burn_in(wanted, lambda line: typer.echo(line, err=True))
    if as_json:
        print_json({"check": name, **one.model_dump(mode="json")} for name, one in found.outcomes.items())
    for name in found.left:
        typer.echo(f"left     {name}", err=True)
    typer.echo(f"{out / 'burnin.html'}", err=True)
    if found.failed:
        raise typer.Exit(1)


def _chosen(checks: "list[Check]", only: list[str] | None) -> "list[Check]":
    """Return the checks named by `only`, or all.

    Raises:
        OptionError: no check has such a name.
    """
    from launcher.errors import OptionError
    from launcher.plan.burnin.check import named

    if only is None:
        return checks
    for name in only:
        if not named(checks, [name]):
            raise OptionError(
                f"no check is named {name!r}", remedy=f"one of: {', '.join(check.name for check in checks)}"
            )
    return named(checks, only)


def _print_list(checks: "list[Check]", as_json: bool) -> None:
    from rich.table import Table

    from launcher.output import print_table

    if as_json:
        print_json({"check": one.name, "about": one.about, "gpu": one.gpu, "cpu": one.cpu} for one in checks)
        return
    table = Table("check", "seconds", "on a CPU", "what it shows", box=None, pad_edge=False)
    for one in checks:
        table.add_row(one.name, f"{one.gpu:g}", f"{one.cpu:g}", one.about)
    print_table(table)
