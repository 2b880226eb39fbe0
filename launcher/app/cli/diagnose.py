"""`maskfleet diagnose`: measures a checkpoint's hidden states by linear probes and similarity."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.options import CheckpointArgument, DataOption, JsonOption, StepOption, print_json, require_model
from launcher.progress import work

if TYPE_CHECKING:
    from launcher.after.diagnose.evaluate import Diagnosis
    from launcher.runtime.recipe.parts import Pooling
    from launcher.runtime.run.evaluations import Figure


class PoolingOption(StrEnum):  # an enum, because typer takes no list of Literal
    CLS = "cls"
    MEAN = "mean"
    MAX = "max"


def diagnose(
    checkpoint: CheckpointArgument,
    step: StepOption = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            help="A task's name or YAML file: a classification task for a linear probe, a similarity task for a rank "
            "correlation. Repeatable.",
        ),
    ] = None,
    data: DataOption = None,
    pooling: Annotated[
        list[PoolingOption] | None,
        typer.Option("--pooling", help="How hidden states become one vector. Repeatable. Default: cls and mean."),
    ] = None,
    limit: Annotated[
        int,
        typer.Option("--limit", min=4, help="Largest number of examples that a probe takes from a split."),
    ] = 4000,
    as_json: JsonOption = False,
) -> None:
    """Measure linear probes and similarity of a frozen checkpoint, layer by layer.

    For a run, also the held-out loss by row length and by source. A folder is measured on the tasks only.

    Example: `maskfleet diagnose runs/base --task sst2 --data glue/`
    """
    from launcher.after.tasks.task import load_task

    for name in task or ():
        load_task(name, data)
    require_model(checkpoint)
    with work("loading libraries"):
        from launcher.after.diagnose.evaluate import diagnose_checkpoint
    poolings: list[Pooling] = [one.value for one in pooling or (PoolingOption.CLS, PoolingOption.MEAN)]
    found = diagnose_checkpoint(checkpoint, step, tasks=task or (), data=data, poolings=poolings, limit=limit)
    for subject in found:
        if as_json:
            print_json(subject.records())
        else:
            _print_diagnosis(subject)


def _print_diagnosis(diagnosis: "Diagnosis") -> None:
    typer.echo(f"{diagnosis.title}")
    _print_layer_figures([figure for figure in diagnosis.figures if figure.layer is not None])
    _print_other_figures([figure for figure in diagnosis.figures if figure.layer is None])
    typer.echo("")


def _print_layer_figures(figures: Sequence["Figure"]) -> None:
    """Print a row for each pooling and layer, and a column for each measure."""
    from rich.table import Table

    from launcher.output import print_table

    if not figures:
        return
    columns = list(dict.fromkeys(figure.measure for figure in figures))
    table = Table("pooling", "layer", *map(str.capitalize, columns), box=None, pad_edge=False)
    places = list(dict.fromkeys((figure.pooling, figure.layer) for figure in figures))
    values = {(figure.pooling, figure.layer, figure.measure): figure.value for figure in figures}
    for place in places:
        table.add_row(*map(str, place), *(_number_text(values.get((*place, column))) for column in columns))
    print_table(table)


def _print_other_figures(figures: Iterable["Figure"]) -> None:
    from rich.table import Table

    from launcher.output import print_table

    table = Table("measure", "of", "value", box=None, pad_edge=False)
    for figure in figures:
        of = figure.source or (f"rows of {figure.length:,}" if figure.length else figure.pooling or "")
        table.add_row(figure.measure.replace("_", " "), of, _number_text(figure.value))
    if table.row_count:
        print_table(table)


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
