"""Real English on every machine: Python's documentation strings and its help topics, as one document a file.

Nothing is imported or run: the standard library's sources are parsed.
"""

import ast
import hashlib
import inspect
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

_SHORTEST = 200  # characters: below this a module's documentation is no text to learn from
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}

Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def python_documentation() -> Iterator[tuple[str, str]]:
    """(name, text) of each documented module of the standard library and each help topic, no text twice.

    Paragraphs that occur in several modules (licences, mostly) are kept in the first one only.
    """
    seen: set[bytes] = set()
    for name, text in _documents():
        kept = [paragraph for paragraph in text.split("\n\n") if _is_new(paragraph, seen)]
        document = "\n\n".join(kept)
        if len(document) >= _SHORTEST:
            yield name, document


def write_jsonl(path: Path) -> tuple[int, int]:
    """Writes the documentation to `path`, one document a line. Returns documents and bytes of text."""
    documents = size = 0
    with path.open("w", encoding="utf-8") as lines:
        for name, text in python_documentation():
            lines.write(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
            documents += 1
            size += len(text.encode())
    return documents, size


def _documents() -> Iterator[tuple[str, str]]:
    for name, text in sorted(topics.topics.items()):
        yield f"topic {name}", inspect.cleandoc(text)
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _SKIPPED.intersection(relative.parts):
            yield str(relative), "\n\n".join(_docstrings(path))


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and deliberately broken files among the sources
        return
    for node in ast.walk(tree):
        if isinstance(node, Node):
            text = ast.get_docstring(node)
            if text:
                yield text


def _is_new(paragraph: str, seen: set[bytes]) -> bool:
    digest = hashlib.blake2b(" ".join(paragraph.split()).encode(errors="replace"), digest_size=16).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True
