"""`maskfleet estimate`: the memory, time and data that a recipe needs on given machines."""

from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.recipe import RecipeArgument, SetOption, TinyOption

if TYPE_CHECKING:
    from launcher.runtime.capacity.devices import Cluster
    from launcher.runtime.recipe.schema import Recipe

MtbfOption = Annotated[
    float | None,
    typer.Option(help="Mean hours between failures of a machine. Default: as published for Llama 3; spot: fewer."),
]
MfuOption = Annotated[
    str | None,
    typer.Option(
        help="Share of the GPUs' peak that training reaches (MFU), or a run that recorded it. Default: that of the "
        "most similar known run."
    ),
]
TextOption = Annotated[
    str | None,
    typer.Option(help="Uncompressed size of the corpus, such as 160GB, to estimate its tokens and the epochs."),
]


def estimate(
    recipe: RecipeArgument,
    nodes: Annotated[int | None, typer.Option(help="Number of machines.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs per machine.")] = None,
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
    """Estimate memory, time, data, checkpoints and GPU-hours of a recipe on a cluster, and show the arithmetic.

    Describe the cluster by --nodes, --gpus-per-node and --gpu. Nothing is trained, and only the recipe is read. Figures
    that cannot be computed are assumed, and marked as assumptions.

    Memory and FLOPs are counted by running the recipe's network on meta tensors. Time follows from the share of the
    peak that training reaches (MFU): `train` records it on a GPU, and --mfu RUN reads it from that run.
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

        parse_utilisation(mfu)  # raises for an invalid share before torch is loaded
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

    with work("counting FLOPs and memory of the recipe's network", unit="passes"):
        found = estimate_recipe(recipe, cluster, mfu, text_bytes=text_bytes)
    if as_json:
        typer.echo(json.dumps(estimate_figures(found), indent=2))
        return
    typer.echo(render_text(found))
