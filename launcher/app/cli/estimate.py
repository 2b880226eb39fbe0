"""`maskfleet estimate`: what a recipe needs and how long it takes, on given machines, or on this one by measuring."""

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
    float | None,
    typer.Option(help="Share of the GPUs' peak that training reaches. Default: by a roofline, shown."),
]
TextOption = Annotated[
    str | None,
    typer.Option(help="Size of the corpus, uncompressed, such as 160GB: for its tokens and epochs."),
]


def register(app: typer.Typer) -> None:
    app.command("estimate", rich_help_panel="Prepare")(estimate)


def estimate(
    recipe: RecipeArgument,
    nodes: Annotated[int | None, typer.Option(help="Machines.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of each.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="H100, H200, B200, MI300X, A100-80, A100-40, L40S, L4, A10G or V100.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Run some steps on this machine, on synthetic rows, and go by them."),
    ] = False,
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

    With --measure, real steps of the recipe run on this machine's GPUs, or on its CPU, for some seconds a phase: tokens
    a second, MFU, peak memory, the slowest parts, and how long the recipe would take here. The estimate of a cluster of
    the same GPUs goes by what was measured. Without a cluster, it is of this machine, if it has GPUs.
    """
    from launcher.app.cli.recipe import load_recipe
    from launcher.errors import OptionError

    cluster = _cluster(nodes, gpus_per_node, gpu, mtbf_hours)
    if cluster is None and not measure:
        raise OptionError(
            "no cluster is given",
            remedy="give --nodes, --gpus-per-node and --gpu; or --measure, for this machine",
        )
    if measure and mfu is not None:
        raise OptionError(
            f"--mfu {mfu:g} is given with --measure, which measures it", remedy="leave one of the two out"
        )
    from launcher.runtime.capacity.devices import check_share, text_size

    check_share(mfu)
    size = None if text is None else text_size(text)
    wanted = load_recipe(recipe, assignments, tiny)
    if measure:
        _print_measured(wanted, cluster, mtbf_hours, size, as_json=as_json)
    elif cluster is not None:
        _print_estimated(wanted, cluster, mfu, size, as_json=as_json)


def _cluster(
    nodes: int | None, gpus_per_node: int | None, gpu: str | None, mtbf_hours: float | None
) -> "Cluster | None":
    """Return the cluster that the options name; None if they name none.

    Raises:
        OptionError: only some of the options that name a cluster are given.
    """
    from launcher.errors import OptionError
    from launcher.runtime.capacity.devices import MTBF_HOURS, Cluster, find_gpu

    if nodes is None and gpus_per_node is None and gpu is None:
        return None
    if nodes is None or gpus_per_node is None or gpu is None:
        given = {"--nodes": nodes, "--gpus-per-node": gpus_per_node, "--gpu": gpu}
        missing = [option for option, value in given.items() if value is None]
        raise OptionError(
            f"the cluster is incomplete without {' and '.join(missing)}",
            remedy="give --nodes, --gpus-per-node and --gpu",
        )
    hours = MTBF_HOURS if mtbf_hours is None else mtbf_hours
    return Cluster(nodes, gpus_per_node, find_gpu(gpu), hours * 3600)


def _print_estimated(
    recipe: "Recipe",
    cluster: "Cluster",
    mfu: float | None,
    text: float | None,
    *,
    as_json: bool,
) -> None:
    import json

    from launcher.plan.estimate.estimate import estimate
    from launcher.plan.estimate.render import figures, render

    found = estimate(recipe, cluster, mfu, text=text)
    if as_json:
        typer.echo(json.dumps(figures(found), indent=2))
        return
    typer.echo(render(found))


def _print_measured(
    recipe: "Recipe",
    cluster: "Cluster | None",
    mtbf_hours: float | None,
    text: float | None,
    *,
    as_json: bool,
) -> None:
    """Print the measurement, then the estimate based on it, for `cluster` or for this machine's GPUs."""
    import json

    from launcher.plan.estimate.estimate import estimate
    from launcher.plan.estimate.render import figures, render
    from launcher.plan.measure import render as measured
    from launcher.plan.measure.measure import measure, utilisations

    report = measure(recipe, lambda line: typer.echo(line, err=True))
    gpu = report.machine.gpu
    if cluster is None and gpu is not None:
        cluster = _cluster(1, report.machine.ranks, gpu.name, mtbf_hours)
    shares = [] if cluster is None else utilisations(report, cluster)
    found = None if cluster is None else estimate(recipe, cluster, measured=shares, text=text)
    if as_json:
        of_recipe = {"recipe": recipe.name, "parameters": report.parameters}
        of_cluster = figures(found) if found else {}
        whole = {**of_recipe, **of_cluster, "measured": measured.figures(report)}
        typer.echo(json.dumps(whole, indent=2))
        return
    typer.echo(measured.render(report))
    if found is not None and cluster is not None:
        by = "by what was measured" if shares else f"by assumptions: no {cluster.gpu.name} was measured"
        typer.echo(f"\nThe estimate, {by}\n\n{render(found)}")
