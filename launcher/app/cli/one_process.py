"""Ends `finetune` and `embed`, commands that compute for hours in one process.

The same command, given again, computes the same result; with a scratch folder it continues from there.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from data_service.errors import UserError as DataError
from data_service.printable import visible, without_secrets
from encoder_core.errors import UserError as ModelError


@contextmanager
def repeatable(scratch: Path | None = None) -> Iterator[None]:
    """End the command with code 75 after a signal or an error that may pass by itself. `scratch` is the folder that
    keeps what is done.
    """
    from launcher.contract import REPEAT
    from launcher.signals import answering

    stays = (
        "the same command computes the same"
        if scratch is None
        else f"the same command goes on, with what {scratch} holds"
    )
    with answering(REPEAT, stays), passing():
        yield


@contextmanager
def passing() -> Iterator[None]:
    """Show an error that may pass by itself, and end the command with 75. All other errors are raised."""
    from launcher.contract import MISTAKE, code_of

    try:
        yield
    except (DataError, ModelError) as error:
        if code_of(error) == MISTAKE:
            raise
        say(f"{error.problem}\n  {error.remedy}")
        raise typer.Exit(code_of(error)) from error


@contextmanager
def told(*names: str) -> Iterator[None]:
    """Send messages of these loggers to standard error inside the block."""
    from launcher.command import screen

    handler = logging.StreamHandler(screen(2))
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
            logging.getLogger(name).removeHandler(handler)


def say(text: str) -> None:
    """Print a line to standard error."""
    typer.echo(visible(without_secrets(text)), err=True)
