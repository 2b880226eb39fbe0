"""`maskfleet fill`: fills the masks of a text with a checkpoint."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.app.cli.options import (
    CheckpointArgument,
    JsonOption,
    StepOption,
    print_json,
    refuse_without_effect,
    require_model,
)
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
            help="Number of steps; each predicts all masks and keeps the most probable. Default: one per mask.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0: most probable tokens.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling: equal seeds give equal text.")] = 0,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="Show this many candidates for the only mask, most probable first."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fill the masks of a text with a masked language model, or let a BART model rewrite the text.

    Each step predicts all masks and keeps the most probable predictions. This suits models trained by masked diffusion
    (objective.diffusion), which have seen rows with many masks; others can fill a few. A BART model reads the text and
    rewrites all of it, token by token; a <mask> stands for any number of tokens.

    Example: `maskfleet fill runs/base "The method <mask> an <mask:3>." --steps 2`
    """
    if count is not None:
        refuse_without_effect("--count", {"--steps": steps, "--temperature": temperature})
    require_model(checkpoint)
    if "<mask" not in text:
        raise OptionError(f"{text!r} has no <mask>", remedy="write <mask> for a missing token, <mask:20> for twenty")
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
    """Return the filled text, or `count` candidates for its mask. Raises OptionError: a BART has no such options."""
    from checkpoints.hf.load import read_folder_config
    from launcher.after.fill.fill import MaskFiller, TextWriter

    if read_folder_config(model.folder).has_decoder:
        if count is not None or steps is not None:
            raise OptionError(
                f"{model.name} rewrites the text token by token: it has neither steps nor candidates for one mask",
                remedy="leave --steps and --count out",
            )
        return [{"text": TextWriter(model.folder).write(text, temperature, seed)}]
    if count is None:
        return [{"text": MaskFiller(model.folder).fill(text, steps=steps, temperature=temperature, seed=seed)}]
    guesses = MaskFiller(model.folder).top_candidates(text, count)
    return [{"text": guess.text, "probability": guess.probability} for guess in guesses]
