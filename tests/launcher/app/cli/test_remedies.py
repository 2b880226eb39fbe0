"""Whatever we tell people to type exists: the commands and options in messages, docstrings and recipes."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import typer.main

from launcher.app.cli import main as cli

ROOT = Path(__file__).parents[4]
PACKAGES = ("launcher", "data_service", "checkpoints", "encoder_core")
TOP = (*PACKAGES, "infra", "tests")
CODE = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
RECIPES = sorted((ROOT / "launcher/runtime/recipe/library").glob("*.yaml"))

_COMMAND = re.compile(r"(?<!of )\bmaskfleet ((?:[a-z]+(?:-[a-z]+)*)(?: [a-z]+(?:-[a-z]+)*)?)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_OTHERS = {"--shm-size", "--long", "--ultra", "--no-deps", "--help"}  # of other programs that our words name


def tree() -> dict[str, set[str]]:
    """The options of each command, and of each group, by its words."""
    found: dict[str, set[str]] = {}

    def add(command: object, words: str) -> None:
        found[words] = {
            option
            for parameter in getattr(command, "params", [])
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, child in getattr(command, "commands", {}).items():
            add(child, f"{words} {name}".strip())

    add(typer.main.get_command(cli.app), "")
    return found


TREE = tree()
OPTIONS = set.union(*TREE.values()) | _OTHERS


def unknown(text: str) -> Iterator[str]:
    """Commands in `text` that there are none of."""
    for words in _COMMAND.findall(text):
        first, _, second = words.partition(" ")
        if first not in TREE or (
            second and second.isalpha() and any(c.startswith(f"{first} ") for c in TREE) and words not in TREE
        ):
            yield f"maskfleet {words}"


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Every literal, also the fixed parts of one with values in it, and those of a sentence together."""
    for node in nodes(path):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def remedies(path: Path) -> Iterator[tuple[int, str]]:
    """What the keyword `remedy` is given, as far as it is written there."""
    for node in nodes(path):
        if isinstance(node, ast.keyword) and node.arg == "remedy":
            inner = (one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant))
            yield node.value.lineno, " ".join(one for one in inner if isinstance(one, str))


def test_commands_in_the_code_exist() -> None:
    """Those in remedies, and everywhere those that are shown as such."""
    told = ((path, line, text) for path in CODE for line, text in remedies(path))
    shown = (
        (path, line, command)
        for path in CODE
        for line, text in strings(path)
        for command in re.findall(r"`(maskfleet [^`]*)`|next: (?:maskfleet .*)", text)
    )
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {command}"
        for path, line, text in (*told, *shown)
        for command in unknown(text)
    ]
    assert wrong == []


def test_commands_in_readmes_exist() -> None:
    readmes = [ROOT / "README.md", *(path for top in TOP for path in (ROOT / top).rglob("README.md"))]
    told = {command for path in readmes for command in unknown(path.read_text("utf-8"))}
    assert told == set()


def test_commands_in_recipes_exist() -> None:
    shown = re.findall(r"^# +(maskfleet .*)$", "\n".join(path.read_text() for path in RECIPES), re.MULTILINE)
    assert shown
    assert [command for text in shown for command in unknown(text)] == []


def test_options_in_remedies_exist() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {option}"
        for path in CODE
        for line, text in remedies(path)
        for option in _OPTION.findall(text)
        if option not in OPTIONS
    ]
    assert wrong == []


def test_what_is_wrong_is_found() -> None:
    assert list(unknown("see `maskfleet export` for more")) == ["maskfleet export"]
    assert list(unknown("maskfleet checkpoints exprot RUN")) == ["maskfleet checkpoints exprot"]
    assert list(unknown("maskfleet checkpoints export RUN; maskfleet train RUN")) == []
