"""Output of the commands that compute for hours: `finetune`, `evaluate` and `embed`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from data_service.printable import escape_controls, mask_secrets


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


def print_stderr(text: str) -> None:
    """Print a line to standard error."""
    typer.echo(escape_controls(mask_secrets(text)), err=True)
