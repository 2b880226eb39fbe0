"""`maskfleet fill`: fills the masks of a text with a checkpoint."""

from typing import Annotated

import typer

from launcher.app.cli.options import CheckpointArgument, JsonOption, StepOption, print_json, require_model
from launcher.errors import OptionError
from launcher.progress import work


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Look after it")(fill)


def fill(
    checkpoint: CheckpointArgument,
    text: Annotated[
        str,
        typer.Argument(
            help="Text with masks: <mask> is one token, <mask:20> are twenty.", show_default=False
        ),
    ],
    step: StepOption = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="Predictions of all masks; each keeps the surest ones. Default: one a mask.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="At which tokens are drawn; 0: the likeliest.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of the draws: equal seeds give equal text.")
    ] = 0,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", min=1, help="Of a text with one mask, show so many tokens, the likeliest first."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fill the masks of a text with a masked language model.

    In each step all masks are predicted, and the surest predictions stay. It is meant for models that masked diffusion
    trained (objective.diffusion), which know rows with many masks; others fill a few.

    Example: `maskfleet fill runs/base "The method <mask> an <mask:3>." --steps 2`
    """
    require_model(checkpoint)
    if "<mask" not in text:
        raise OptionError(
            f"{text!r} has no <mask>", remedy="write <mask> where a token is wanted, or <mask:20>"
        )
    with work("loading libraries"):
        from launcher.after.fill.fill import MaskFiller, Sampling
        from launcher.after.finetune.pretrained import open_pretrained
    with open_pretrained(checkpoint, step) as model:
        filler = MaskFiller(model.folder)
        if count is not None:
            guesses = filler.guesses(text, count)
            records = [{"text": guess.text, "probability": guess.probability} for guess in guesses]
        else:
            records = [{"text": filler.fill(text, Sampling(steps, temperature, seed))}]
    if as_json:
        print_json(records)
        return
    for record in records:
        probability = record.get("probability")
        typer.echo(record["text"] if probability is None else f"{probability:7.2%}  {record['text']}")
