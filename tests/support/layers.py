"""Rooms (a package's folders) and the arrows between them, by the imports: `python tests/support/layers.py`."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
WINGS = ("runtime", "observe", "plan", "after", "app")
PACKAGES = (
    *("launcher", *(f"launcher.{wing}" for wing in WINGS)),
    *("data_service", "encoder_core", "checkpoints", "tests.support"),
)


def arrows(package: str) -> dict[str, set[str]]:
    """Room -> the rooms of the same package that it imports, imports inside functions included. A module that lies in
    no room counts as one where it imports rooms."""
    found: dict[str, set[str]] = {}
    for path in sorted(_folder(package).rglob("*.py")):
        own = path.relative_to(_folder(package)).parts[0].removesuffix(".py")
        rooms = {room for name in _imported(path) if (room := _room(package, name)) is not None}
        if rooms - {own}:
            found.setdefault(own, set()).update(rooms - {own})
    return found


def file_arrows() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports, imports inside functions included."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for package in ("launcher", "data_service", "encoder_core", "checkpoints")
        for path in sorted(_folder(package).rglob("*.py"))
    }
    return {
        module: {name for taken in _imported(path) for name in (taken, taken.rpartition(".")[0])} & files.keys()
        for module, path in files.items()
    }


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Rooms, or modules, that import each other in a circle; empty if none do."""
    left = {room: others & graph.keys() for room, others in graph.items()}
    while free := {room for room, others in left.items() if not others}:
        left = {room: others - free for room, others in left.items() if room not in free}
    return sorted(left)


@cache
def _imported(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def _room(package: str, name: str) -> str | None:
    """The room of `package` that the imported `name` lies in; None if it is elsewhere, or in no room."""
    room = name.removeprefix(f"{package}.").partition(".")[0]
    return room if name.startswith(f"{package}.") and (_folder(package) / room).is_dir() and room else None


def _folder(package: str) -> Path:
    return ROOT / package.replace(".", "/")


if __name__ == "__main__":
    for package in PACKAGES:
        graph = arrows(package)
        print(f"{package}: {sum(map(len, graph.values()))} arrows")
        for room, others in sorted(graph.items()):
            print(f"  {room:12} -> {' '.join(sorted(others))}")
