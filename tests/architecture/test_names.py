"""Names of ours in strings are there: dotted names, those that are set on a module, and imports of programs in strings.

mypy holds all other names, in the tests, too.
"""

import ast
import re
import subprocess
import symtable
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = "launcher|data_service|encoder_core|checkpoints|tests"
DOTTED = re.compile(rf"({OURS})(\.[A-Za-z_]\w*)+")
PROGRAM = re.compile(rf"^\s*(from|import) ({OURS})\b", re.MULTILINE)
OTHER = (".py", ".md", ".yaml", ".json", ".txt", ".sh", ".log", ".tsv")


@cache
def names_of(module: str) -> frozenset[str] | None:
    """What a module binds when it is imported; nothing of a folder, None if there is neither."""
    place = ROOT / module.replace(".", "/")
    file = next((f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()), None)
    if file is None:
        return frozenset() if place.is_dir() else None
    symbols = symtable.symtable(file.read_text("utf-8"), str(file), "exec").get_symbols()
    bound = (s.get_name() for s in symbols if s.is_assigned() or s.is_imported() or s.is_namespace())
    return frozenset(bound) | {"__file__", "__name__", "__doc__", "__path__"}


def is_there(name: str) -> bool:
    """A module, or something in one; what a class has is not looked at."""
    module, _, last = name.rpartition(".")
    while module and names_of(module) is None:
        module, _, last = module.rpartition(".")
    return names_of(name) is not None or last in (names_of(module) or ())


def names_in_strings(program: str) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(program)))
    modules = {
        (alias.asname or alias.name): f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and re.match(rf"({OURS})\b", node.module or "")
        for alias in node.names
    }
    for node in nodes:
        match node:
            case ast.Call(args=[ast.Name(of), ast.Constant(str() as name), *_]) if of in modules:
                if names_of(modules[of]) is not None:  # a module, as in patch.setattr(x, "name", ...)
                    yield f"{modules[of]}.{name}"
            case ast.Constant(str() as text) if DOTTED.fullmatch(text) and not text.endswith(OTHER):
                yield text
            case ast.Constant(str() as text) if "\n" in text and PROGRAM.search(text):
                try:
                    yield from names_imported(text)
                except SyntaxError:  # a document
                    continue


def names_imported(program: str) -> Iterator[str]:
    """What a program imports of ours, and what it reads from or sets on the modules among that."""
    modules: dict[str, str] = {}
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and re.match(rf"({OURS})\b", node.module or ""):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            modules |= {(one.asname or one.name): f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if DOTTED.fullmatch(alias.name))
    for node in ast.walk(ast.parse(program)):
        match node:
            case ast.Attribute(value=ast.Name(of), attr=attr) if of in modules:
                if names_of(modules[of]) is not None:
                    yield f"{modules[of]}.{attr}"


def test_names_of_ours_in_strings_are_there() -> None:
    listing = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / file for file in listing.stdout.split("\0") if file]
    found = [(f, name) for f in files if f.exists() for name in names_in_strings(f.read_text("utf-8"))]
    assert len(found) > 200
    assert [f"{f.relative_to(ROOT)}: {name}" for f, name in found if not is_there(name)] == []
