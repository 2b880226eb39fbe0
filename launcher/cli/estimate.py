"""`maskfleet estimate`: what a recipe needs and takes on given machines."""

from typing import Annotated

import typer

from launcher.cli.recipe import RecipeArgument, SetOption, TinyOption


def register(app: typer.Typer) -> None:
    app.command("estimate", rich_help_panel="Prepare")(estimate)


def estimate(
    recipe: RecipeArgument,
    nodes: Annotated[int, typer.Option(help="Machines.")],
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each.")],
    gpu: Annotated[str, typer.Option(help="H100, H200, B200, A100-80, A100-40, V100, L4 or A10G.")],
    assignments: SetOption = None,
    tiny: TinyOption = False,
    mtbf_hours: Annotated[
        float | None,
        typer.Option(
            help="Hours between failures of one machine. Default: Llama 3's; spot machines last less."
        ),
    ] = None,
    mfu: Annotated[
        float | None,
        typer.Option(help="Share of the GPUs' peak that training reaches. Default: a published run's."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures only, as JSON.")] = False,
) -> None:
    """Memory, time, data, checkpoints and GPU-hours of a recipe, with the arithmetic.

    Nothing is run and nothing read but the recipe. What cannot be computed is assumed, and said to be.
    """
    from launcher.cli.recipe import load_recipe
    from launcher.estimate.assumptions import MTBF_HOURS
    from launcher.estimate.cluster import Cluster
    from launcher.estimate.estimate import estimate
    from launcher.estimate.figures import as_text
    from launcher.estimate.gpus import find_gpu
    from launcher.estimate.render import render

    hours = MTBF_HOURS if mtbf_hours is None else mtbf_hours
    cluster = Cluster(nodes, gpus_per_node, find_gpu(gpu), hours * 3600)
    found = estimate(load_recipe(recipe, assignments, tiny), cluster, mfu)
    typer.echo(as_text(found) if as_json else render(found))
