"""The command line in this process."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from launcher.app.cli import main as cli


def maskfleet(*arguments: object) -> str:
    """What `maskfleet ARGUMENTS` prints. It must end well; what it raises is raised."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def exit_code(*arguments: object) -> int:
    """How `maskfleet ARGUMENTS` ends. What it prints, mistakes included, is on standard output and error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["maskfleet", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def _commands(group: Any, words: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        below = f"{words} {name}".strip()
        if hasattr(command, "commands"):
            yield from _commands(command, below)
        else:
            yield below, command


def command_tree() -> dict[str, Any]:
    """Every command by its words, without groups."""
    return dict(_commands(typer.main.get_command(cli.app)))
