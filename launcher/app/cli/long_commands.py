"""Output of the commands that compute for hours: `finetune`, `evaluate` and `embed`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from data_service.printable import escape_controls, mask_secrets


@contextmanager
def show_logs(name: str) -> Iterator[None]:
    """Send messages of the logger `name` to standard error inside the block."""
    from launcher.command import open_terminal_stream

    logger, handler = logging.getLogger(name), logging.StreamHandler(open_terminal_stream(2))
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def print_stderr(text: str) -> None:
    """Print a line to standard error."""
    typer.echo(escape_controls(mask_secrets(text)), err=True)
