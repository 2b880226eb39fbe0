"""What the demo says: commands that exist and can be given as they are."""

import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from launcher.app.cli.demo_path import Demo
from launcher.app.cli.main import app


@pytest.mark.parametrize(("text", "count"), [(None, 4), ("my text.txt", 3)])
def test_at_the_end_it_says_which_commands_to_try(
    text: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the program as it was called, since it is not on the path."""
    monkeypatch.setattr(sys, "argv", [".venv/bin/maskfleet", "demo"])
    monkeypatch.setenv("PATH", "/nowhere")
    console = Console(width=200, record=True, file=io.StringIO())
    Demo(Path("a folder"), text, console).print_next_steps()
    lines = [line for line in console.export_text().splitlines() if line.startswith("      ")]
    assert len(lines) == count
    commands = getattr(typer.main.get_command(app), "commands")  # noqa: B009 - typer carries its own click
    for line in lines:
        words = shlex.split(re.split(r"\s{3,}", line.strip())[0])
        assert words[0] == ".venv/bin/maskfleet"
        assert words[1] in commands
        assert ("YOUR_TEXT" in words) != any(word.startswith("a folder/") for word in words), "one argument"
