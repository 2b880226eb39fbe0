"""Ends `finetune`, `evaluate` and `embed`, commands that compute for hours and may be given again."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from data_service.printable import visible, without_secrets


@contextmanager
def repeatable() -> Iterator[None]:
    """End the command with code 75 after a signal."""
    from launcher.exit_codes import REPEAT
    from launcher.signals import answering

    with answering(REPEAT, "the same command begins again"):
        yield


@contextmanager
def show_logs(*names: str) -> Iterator[None]:
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
