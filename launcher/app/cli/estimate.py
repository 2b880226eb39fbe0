"""`maskfleet estimate`: what a recipe needs and how long it takes, on given machines."""

from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.recipe import RecipeArgument, SetOption, TinyOption

if TYPE_CHECKING:
    from launcher.runtime.capacity.devices import Cluster
    from launcher.runtime.recipe.schema import Recipe

MtbfOption = Annotated[
    float | None,
    typer.Option(help="Hours between failures of one machine. Default: Llama 3's; spot machines last less."),
]
MfuOption = Annotated[
    str | None,
    typer.Option(
        help="Share of the GPUs' peak that training reaches, or a run that recorded its own. Default: that of the most "
        "similar run that is known."
    ),
]
TextOption = Annotated[
    str | None,
    typer.Option(help="Size of the corpus, uncompressed, such as 160GB: for its tokens and epochs."),
]


def estimate(
    recipe: RecipeArgument,
    nodes: Annotated[int | None, typer.Option(help="Machines.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of each.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="H100, H200, B200, MI300X, A100-80, A100-40, L40S, L4, A10G or V100.")
    ] = None,
    assignments: SetOption = None,
    tiny: TinyOption = False,
    mtbf_hours: MtbfOption = None,
    mfu: MfuOption = None,
    text: TextOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures only, as JSON.")] = False,
) -> None:
    """Memory, time, data, checkpoints and GPU-hours of a recipe on a cluster, with the arithmetic.

    Name the cluster by --nodes, --gpus-per-node and --gpu. Nothing is run then, and nothing read but the recipe. What
    cannot be computed is assumed, and said to be.

    Memory and FLOPs are counted by running the recipe's own network without numbers. Time follows from the share of the
    peak that training reaches: `train` records it (MFU) on a GPU, and --mfu RUN takes it from there.
    """
    from launcher.app.cli.recipe import load_recipe
    from launcher.errors import OptionError

    if nodes is None or gpus_per_node is None or gpu is None:
        needed = {"--nodes": nodes, "--gpus-per-node": gpus_per_node, "--gpu": gpu}
        missing = [option for option, value in needed.items() if value is None]
        raise OptionError(
            f"the cluster is incomplete without {' and '.join(missing)}",
            remedy="give --nodes, --gpus-per-node and --gpu",
        )
    from launcher.runtime.capacity.devices import NODE_MTBF_HOURS, Cluster, find_gpu, parse_text_size

    hours = NODE_MTBF_HOURS if mtbf_hours is None else mtbf_hours
    cluster = Cluster(nodes, gpus_per_node, find_gpu(gpu), hours * 3600)
    size = None if text is None else parse_text_size(text)
    if mfu is not None:
        from launcher.plan.estimate.utilisation import parse_utilisation

        parse_utilisation(mfu)  # raises for a wrong share before torch is loaded
    wanted = load_recipe(recipe, assignments, tiny)
    _print_estimate(wanted, cluster, mfu, size, as_json=as_json)


def _print_estimate(
    recipe: "Recipe",
    cluster: "Cluster",
    mfu: str | None,
    text_bytes: float | None,
    *,
    as_json: bool,
) -> None:
    import json

    from launcher.plan.estimate.estimate import estimate_recipe
    from launcher.plan.estimate.render import estimate_figures, render_text
    from launcher.progress import work

    with work("counting what the recipe's network computes and keeps", unit="passes"):
        found = estimate_recipe(recipe, cluster, mfu, text_bytes=text_bytes)
    if as_json:
        typer.echo(json.dumps(estimate_figures(found), indent=2))
        return
    typer.echo(render_text(found))
