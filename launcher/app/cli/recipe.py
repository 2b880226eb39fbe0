"""`maskfleet recipe`: the bundled recipes, and the size, batch and tokens of a recipe."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data_service.printable import escape_controls
from launcher.app.cli.options import (
    JsonOption,
    print_json,
    refuse_without_effect,
    require_assignments,
    require_model,
    require_recipe,
)
from launcher.errors import OptionError
from launcher.progress import work

if TYPE_CHECKING:
    from launcher.runtime.recipe.schema import Recipe

group = typer.Typer(no_args_is_help=True, help="List, show, check and compare recipes.")

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A bundled recipe's name, or a YAML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value: --set zero=2 --set phases.0.steps=1000."),
]
TinyOption = Annotated[
    bool, typer.Option("--tiny", help="Shrink the model for a CPU: two narrow layers, minutes of training.")
]


def load_recipe(
    name: str, assignments: list[str] | None, tiny: bool, sections: Mapping[str, object] | None = None
) -> "Recipe":
    """Load the recipe that the command line describes. `--set` comes last, so that it also adjusts a tiny recipe.

    `sections`: sections that replace the recipe's own.
    """
    require_recipe(name)
    require_assignments(assignments or ())
    with work("loading the recipe"):
        return _resolve_recipe(name, assignments, tiny, sections)


def _resolve_recipe(
    name: str, assignments: list[str] | None, tiny: bool, sections: Mapping[str, object] | None
) -> "Recipe":
    from launcher.runtime.recipe import tiny as shrink
    from launcher.runtime.recipe.load import load, with_assignments

    recipe = load(name, () if tiny else tuple(assignments or ()), sections)
    return with_assignments(shrink.tiny(recipe), tuple(assignments or ())) if tiny else recipe


@group.command("list")
def list_recipes(as_json: JsonOption = False) -> None:
    """List the recipes that come with Maskfleet, by family.

    Parameters are counted over all networks; if there are two, the discriminator's count comes first.
    """
    from rich.table import Table

    from launcher.output import human_count, print_table
    from launcher.runtime.recipe.load import parse_recipe
    from launcher.runtime.recipe.source import bundled

    recipes = (parse_recipe(text, name, is_bundled=True) for name, text in bundled().items())
    records = sorted(map(_recipe_record, recipes), key=lambda one: (one["family"], one["parameters"], one["steps"]))
    if as_json:
        print_json(records)
        return
    table = Table("family", "recipe", "layers", "parameters", "steps", "tokens", box=None, pad_edge=False)
    previous = ""
    for one in records:
        alone, size = one["discriminator_parameters"], human_count(one["parameters"])
        table.add_row(
            one["family"] if one["family"] != previous else "",
            one["name"],
            f"{one['layers']} x {one['hidden']}",
            f"{human_count(alone)} ({size})" if alone is not None else size,
            f"{one['steps']:,}",
            human_count(one["tokens"]),
        )
        previous = one["family"]
    print_table(table)


def _recipe_record(recipe: "Recipe") -> dict[str, Any]:
    from launcher.runtime.recipe.summary import (
        discriminator_parameter_count,
        model_title,
        parameter_count,
        total_tokens,
    )

    return {
        "name": recipe.name,
        "family": model_title(recipe),
        "layers": recipe.model.layers,
        "hidden": recipe.model.hidden,
        "parameters": parameter_count(recipe),
        "discriminator_parameters": discriminator_parameter_count(recipe),
        "steps": recipe.total_steps,
        "tokens": total_tokens(recipe),
    }


@group.command()
def show(
    recipe: RecipeArgument,
    assignments: SetOption = None,
    tiny: TinyOption = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the file as written, with its comments.")] = False,
    timeline: Annotated[
        bool,
        typer.Option("--timeline", help="Print a table of the steps at which settings change, with rate and batch."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the complete recipe, with every default written out.

    To write your own, start from a bundled one: `maskfleet recipe show roberta-base --raw > mine.yaml`.
    """
    from launcher.runtime.recipe.source import recipe_text

    if as_json and not timeline:
        raise OptionError(
            "--json needs --timeline",
            remedy="add --timeline, or leave out --json: the recipe is printed as YAML",
        )
    if raw:
        refuse_without_effect("--raw", {"--timeline": timeline, "--set": assignments, "--tiny": tiny})
    if timeline:
        wanted = load_recipe(recipe, assignments, tiny)
        from launcher.app.cli.recipe_timeline import print_timeline, timeline_records

        if as_json:
            print_json(timeline_records(wanted))
        else:
            print_timeline(wanted)
        return
    text = recipe_text(recipe) if raw else load_recipe(recipe, assignments, tiny).to_yaml()
    typer.echo(escape_controls(text), nl=False)


@group.command()
def check(recipe: RecipeArgument, assignments: SetOption = None, tiny: TinyOption = False) -> None:
    """Validate a recipe, and state its parameters, batch and tokens.

    Reads no corpus, no tokenizer and no task's data; `maskfleet init` checks those.
    """
    wanted = load_recipe(recipe, assignments, tiny)
    from launcher.after.tasks.measurable import check_tasks
    from launcher.runtime.recipe.summary import summary_lines

    check_tasks(wanted.evaluation.tasks, with_files=False)
    for line in summary_lines(wanted):
        typer.echo(escape_controls(line))


@group.command()
def diff(
    old: Annotated[str, typer.Argument(help="A recipe's name or file.")],
    new: Annotated[str, typer.Argument(help="Another one.")],
) -> None:
    """Compare two recipes field by field, and say which differences an existing run would refuse.

    Exit code 1 if they differ.
    """
    require_recipe(old)
    require_recipe(new)
    from launcher.runtime.recipe import identity
    from launcher.runtime.recipe.load import load

    fields = [identity.flatten(load(name).to_data()) for name in (old, new)]
    differing = [
        path for path in sorted(fields[0].keys() | fields[1].keys()) if fields[0].get(path) != fields[1].get(path)
    ]
    for kind, heading in (
        ("identity", "identity (refused in a running run)"),
        ("operational", "operational (free)"),
    ):
        chosen = [path for path in differing if identity.field_kind(path) == kind]
        if chosen:
            typer.echo(f"{heading}:")
            for line in identity.diff_lines(*({p: f[p] for p in chosen if p in f} for f in fields)):
                typer.echo(f"  {escape_controls(line)}")
    if differing:
        raise typer.Exit(1)
    typer.echo("the same")


@group.command("from")
def from_model(
    folder: Annotated[
        str,
        typer.Argument(metavar="MODEL_FOLDER", help="A model in the transformers format: a folder or s3:// URI."),
    ],
) -> None:
    """Print a recipe that continues to train a model: its family, sizes, tokenizer and settings, with reasons.

    Example: `maskfleet recipe from ./roberta-base > mine.yaml`, then `maskfleet init mine.yaml RUN`
    """
    require_model(folder)
    from launcher.runtime.recipe.continued import commented_yaml, continued_recipe

    typer.echo(escape_controls(commented_yaml(continued_recipe(folder))), nl=False)
