"""`maskfleet finetune`: fine-tunes a checkpoint on a task."""

from contextlib import nullcontext
from typing import Annotated

import typer

from launcher.app.cli.long_commands import show_logs
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

TaskArgument = Annotated[
    str, typer.Argument(metavar="TASK", help="A bundled task's name, or a YAML file. See `maskfleet tasks`.")
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of the task: --set lr=2e-5 --set layer_decay=0.8. Of a list, the first value counts.",
    ),
]


def fine_tune(
    checkpoint: CheckpointArgument,
    task: TaskArgument,
    out: Annotated[
        str | None,
        typer.Option("--out", help="Folder or s3:// URI for the model. Without --out the model is not kept."),
    ] = None,
    data: DataOption = None,
    step: StepOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of head, data order and dropout.")] = 0,
    assignments: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a checkpoint on a task, and write the model in the transformers format.

    The Trainer of transformers trains the model; an interrupted fine-tuning starts again from the beginning. The epoch
    that is best on dev is kept. If a setting is a list, the first value counts; `maskfleet evaluate` tries all.

    Exit codes: 0 done; 2 a mistake; 75 asked to end, or a store does not answer: run the command again.

    Example: `maskfleet finetune s3://bucket/runs/base sst2 --data glue/ --out base-sst2/`
    """
    from launcher.after.finetune.settings import settings_grid
    from launcher.after.tasks.task import load_task
    from launcher.runtime.recipe.document import RecipeDocument, apply_assignments

    with show_logs("launcher.after.finetune"):
        require_assignments(assignments or ())
        asked = load_task(task, data)
        given = apply_assignments(RecipeDocument(dict(asked.finetune), asked.name, {}), assignments or ()).data
        settings = settings_grid(given)[0]
        require_model(checkpoint)
        with work("loading libraries"):
            from checkpoints.hf.export import publish_on_exit
            from data_service.store.open import open_store
            from launcher.after.finetune.pretrained import open_pretrained
            from launcher.after.finetune.run import finetune
        place = nullcontext() if out is None else publish_on_exit(open_store(out))
        with open_pretrained(checkpoint, step) as pretrained, place as folder:
            outcome = finetune(pretrained, asked, settings, seed, folder)
    if as_json:
        print_json([{"settings": settings.model_dump(mode="json"), "seed": seed, **outcome.as_record()}])
        return
    splits = {f"dev, epoch {outcome.best_epoch}": outcome.metrics, **outcome.others}
    for split, metrics in splits.items():
        typer.echo(f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    if out is not None:
        typer.echo(f"{pretrained.name}, fine-tuned on {asked.name}, is in {out}")
