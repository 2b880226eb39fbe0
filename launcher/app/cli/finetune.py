"""`maskfleet finetune`: turns a checkpoint into a model for a task."""

from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.one_process import repeatable, told
from launcher.app.cli.options import (
    CheckpointArgument,
    DataOption,
    JsonOption,
    StepOption,
    print_json,
    require_assignments,
    require_model,
)
from launcher.progress import work

if TYPE_CHECKING:
    from launcher.after.finetune.run import Tried
    from launcher.after.finetune.settings import FinetuneSettings
    from launcher.after.tasks.task import Task


TaskArgument = Annotated[
    str, typer.Argument(metavar="TASK", help="A bundled task's name, or a YAML file. See `maskfleet tasks`.")
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting in place of the task's own: --set lr=2e-5 --set layer_decay=0.8. A list has several.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="After pretraining")(finetune)


def finetune(
    checkpoint: CheckpointArgument,
    task: TaskArgument,
    out: Annotated[
        str | None,
        typer.Option("--out", help="Folder or s3:// URI for the model. Without it the model is not kept."),
    ] = None,
    data: DataOption = None,
    step: StepOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the head, the order and dropout.")] = 0,
    assignments: SettingsOption = None,
    every: Annotated[
        bool,
        typer.Option(
            "--grid", help="Try every combination of the settings' lists, and keep the best on dev."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a checkpoint on a task, and write the model as `transformers` loads it.

    The Trainer of transformers trains it; what was ended begins again when the command is given again. The epoch that
    is best on dev is kept. Where settings are lists, the first value counts, unless --grid.

    Exit codes: 0 done; 2 a mistake; 75 asked to end, or a store that does not answer: run it again.

    Example: `maskfleet finetune s3://bucket/runs/base sst2 --data glue/ --out base-sst2/`
    """
    from launcher.after.tasks.task import load_task

    with repeatable(), told("launcher.after.finetune"):
        require_assignments(assignments or ())
        asked = load_task(task, data)
        choices = _choices(asked, assignments)
        choices = choices if every else choices[:1]
        require_model(checkpoint)
        with work("loading libraries"):
            from launcher.after.finetune.pretrained import open_pretrained
            from launcher.after.finetune.run import try_each
        with open_pretrained(checkpoint, step) as pretrained:
            for one in try_each(pretrained, asked, choices, seed, out):
                if as_json:
                    print_json([_record(one, seed)])
                else:
                    typer.echo(_line(one, choices))
    if out is not None and not as_json:
        typer.echo(f"{pretrained.name}, fine-tuned on {asked.name}, is in {out}")


def _choices(task: "Task", assignments: list[str] | None) -> "tuple[FinetuneSettings, ...]":
    from launcher.after.finetune.settings import candidates
    from launcher.runtime.recipe.document import RecipeDocument, override

    return candidates(
        override(RecipeDocument(dict(task.finetune), task.name, {}), assignments or ()).data, {}
    )


def _record(tried: "Tried", seed: int) -> dict[str, object]:
    outcome = {"metrics": None} if tried.outcome is None else tried.outcome.record()
    settings = tried.settings.model_dump(mode="json")
    return {"settings": settings, "problem": tried.problem, "seed": seed, "best": tried.best, **outcome}


def _line(tried: "Tried", choices: "tuple[FinetuneSettings, ...]") -> str:
    """Return a line of the settings that differ between the choices, and the figures."""
    values = tried.settings.model_dump()
    others = [choice.model_dump() for choice in choices]
    differing = [name for name in values if any(other[name] != values[name] for other in others)]
    told = " ".join(f"{name}={values[name]}" for name in differing)
    if tried.outcome is None:
        return f"{told}: {tried.problem}"
    figures = ", ".join(f"{name} {value:.4f}" for name, value in tried.outcome.metrics.items())
    further = "".join(
        f"; {split}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        for split, metrics in tried.outcome.others.items()
    )
    return f"{told}{': ' if told else ''}dev, epoch {tried.outcome.best_epoch}: {figures}{further}"
