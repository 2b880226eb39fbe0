"""`maskfleet demo`: every step of the path once, on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from launcher.app.cli.options import EncodingOption, require_local_path, validate_options
from launcher.progress import work


def demo(
    text: Annotated[
        str | None,
        typer.Argument(help="Your text: a file, folder or glob. Default: Python's docs."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", callback=require_local_path, help="Folder for everything that is made.")
    ] = Path("maskfleet-demo"),
    encoding: EncodingOption = "utf-8",
) -> None:
    """Make a pretrained and exported DeBERTa from text in minutes: this is what `infra/quickstart` runs.

    Eight stages: text, tokenizer, corpus, run, training on two ranks, evaluation, export, report. Interrupt it
    anywhere and give the command again: it continues.
    """
    if text is not None:
        from data_service.ingest.options import BuildOptions
        from launcher.app.cli.texts import list_text_files

        validate_options(BuildOptions, encoding=encoding)
        list_text_files([text], encoding)
    from rich.console import Console

    with work("loading libraries"):
        from launcher.app.cli.demo_path import Demo
    raise typer.Exit(Demo(out, text, Console(), encoding).run())
