"""What every program of this folder shares: an error that names a remedy, and the end of the command line."""

import sys
from collections.abc import Callable

import typer

from data_service.errors import UserError


class BenchError(UserError):
    """The peer is not installed, or the machine lacks what the measurement needs."""


def note(line: str) -> None:
    """Progress goes to standard error, so that standard output holds the result alone."""
    typer.echo(line, err=True)


def run(command: Callable[..., None]) -> None:
    """`command` as a command line. A user's mistake ends in its message and exit code 2."""
    try:
        typer.run(command)
    except UserError as error:
        typer.echo(f"error: {error.problem}\nremedy: {error.remedy}", err=True)
        sys.exit(2)
