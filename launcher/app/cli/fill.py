"""`maskfleet fill`: fills the masks of a text with a checkpoint."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.app.cli.options import CheckpointArgument, JsonOption, StepOption, print_json, require_model
from launcher.errors import OptionError
from launcher.progress import work

if TYPE_CHECKING:
    from launcher.after.finetune.pretrained import LocalModel


def fill(
    checkpoint: CheckpointArgument,
    text: Annotated[
        str,
        typer.Argument(help="Text with masks: <mask> is one token, <mask:20> are twenty.", show_default=False),
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
        float, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0: the likeliest tokens.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws: equal seeds give equal text.")] = 0,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="Of a text with one mask, show so many tokens, the likeliest first."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fill the masks of a text with a masked language model, or let a BART write the text.

    In each step all masks are predicted, and the surest predictions stay. It is meant for models that masked diffusion
    trained (objective.diffusion), which know rows with many masks; others fill a few. A BART reads the text and writes
    all of it anew, token by token; a <mask> stands for any number of tokens.

    Example: `maskfleet fill runs/base "The method <mask> an <mask:3>." --steps 2`
    """
    require_model(checkpoint)
    if "<mask" not in text:
        raise OptionError(f"{text!r} has no <mask>", remedy="write <mask> where a token is wanted, or <mask:20>")
    with work("loading libraries"):
        from launcher.after.finetune.pretrained import open_pretrained
    with open_pretrained(checkpoint, step) as model:
        records = _fill_records(model, text, count, steps=steps, temperature=temperature, seed=seed)
    if as_json:
        print_json(records)
        return
    for record in records:
        probability = record.get("probability")
        typer.echo(record["text"] if probability is None else f"{probability:7.2%}  {record['text']}")


def _fill_records(
    model: "LocalModel", text: str, count: int | None, *, steps: int | None, temperature: float, seed: int
) -> list[dict[str, Any]]:
    """Return the text, or `count` candidates for its mask. Raises OptionError: the model has no such options."""
    from checkpoints.hf.load import read_folder_config
    from launcher.after.fill.fill import MaskFiller, TextWriter

    if read_folder_config(model.folder).has_decoder:
        if count is not None or steps is not None:
            raise OptionError(
                f"{model.name} writes a text token by token: it has no steps, and no guesses for one mask",
                remedy="leave --steps and --count out",
            )
        return [{"text": TextWriter(model.folder).write(text, temperature, seed)}]
    if count is None:
        return [{"text": MaskFiller(model.folder).fill(text, steps=steps, temperature=temperature, seed=seed)}]
    guesses = MaskFiller(model.folder).top_candidates(text, count)
    return [{"text": guess.text, "probability": guess.probability} for guess in guesses]
