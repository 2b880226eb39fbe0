"""`maskfleet demo`: runs every stage once, from raw text to an exported model, on this machine."""

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
        Path, typer.Option("--out", callback=require_local_path, help="Folder for all output files.")
    ] = Path("maskfleet-demo"),
    encoding: EncodingOption = "utf-8",
) -> None:
    """Pretrain a small DeBERTa from text in minutes, and export it: `infra/quickstart` runs this command.

    Eight stages: text, tokenizer, corpus, run, training on two ranks, evaluation, export, report. After an interruption
    at any point, the same command continues.
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
