"""Ends `finetune`, `evaluate` and `embed`, commands that compute for hours and may be given again."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from data_service.printable import mask_secrets, visible


@contextmanager
def repeatable() -> Iterator[None]:
    """End the command with code 75 after a signal."""
    from launcher.exit_codes import REPEAT
    from launcher.signals import signal_response

    with signal_response(REPEAT, "the same command begins again"):
        yield


@contextmanager
def show_logs(*names: str) -> Iterator[None]:
    """Send messages of these loggers to standard error inside the block."""
    from launcher.command import open_terminal_stream

    handler = logging.StreamHandler(open_terminal_stream(2))
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
    typer.echo(visible(mask_secrets(text)), err=True)
