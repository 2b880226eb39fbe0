"""What documents name exists: files, folders, sections, commands and their options, keys of recipes in examples."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from launcher.app.cli.main import app
from tests.support.checks.guide import GUIDE, ROOT, document_blocks, schema

HISTORY = {"CHANGELOG.md"}  # what was there then
EVERYWHERE = ("__init__.py", "errors.py")  # of every package, and the same in each
OF_OTHERS = {"run_mlm.py", "pretrain_bert.py", "tools/preprocess_data.py", "convert_dataset.py", "main.py"}
TOP = ("encoder_core", "data_service", "checkpoints", "launcher", "infra", "tests")
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|NNN")


@cache
def tracked() -> list[str]:
    """Files of the checkout, relative to its root; none of what is no checkout."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    return [name for name in listing.stdout.split("\0") if name and (ROOT / name).exists()]


def documents() -> list[Path]:
    return [ROOT / name for name in tracked() if name.endswith(".md") and name not in HISTORY]


def prose(path: Path) -> str:
    return _FENCED.sub("", path.read_text("utf-8"))


def sections(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in _LINK.findall(prose(path)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, section = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.relative_to(ROOT)} links to {link}"
        assert not section or section in sections(target), f"{path.relative_to(ROOT)} links to {link}"


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path: Path) -> None:
    """Paths in backticks: from the root, from the document's own folder, or the end of a file's path."""
    files = tracked()
    for code in _CODE.findall(prose(path)):
        for name in named_paths(code):
            there = (ROOT / name).exists() or (path.parent / name).exists()
            there = there or any(file.endswith(f"/{name}") for file in files)
            assert there, f"{path.relative_to(ROOT)} names {name}"


PACKAGES = [path for path in documents() if path.name == "README.md" and (path.parent / "__init__.py").exists()]


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_packages_readme_names_its_modules_and_rooms_and_no_others(path: Path) -> None:
    """In a table or in a drawing; a name with a star stands for several."""
    text = path.read_text("utf-8")
    named = set(re.findall(r"[\w*]+(?:/[\w*]+)*(?:\.py\b|/)", text))
    below = [name.removeprefix(f"{path.parent.relative_to(ROOT)}/") for name in tracked()]
    here = [name for name in below if (path.parent / name).exists() and not name.endswith(EVERYWHERE)]
    parts = {name for name in here if re.fullmatch(r"\w+\.py", name)}
    parts |= {f"{name.split('/')[0]}/" for name in here if "/" in name and name.endswith(".py")}
    unnamed = sorted(part for part in parts if not any(fnmatch(part, name) for name in named))
    assert unnamed == [], f"{path.relative_to(ROOT)} does not name {unnamed}"
    drawn = {name for _, block in document_blocks(path) for name in re.findall(r"[\w*/]+\.py\b", block)}
    gone = sorted(name for name in drawn if not any(fnmatch(f"/{file}", f"*/{name}") for file in here))
    assert gone == [], f"{path.relative_to(ROOT)} draws {gone}"


def test_documents_that_code_names_exist() -> None:
    files = [ROOT / name for name in tracked() if name.endswith((".py", ".yaml")) and name.split("/")[0] != "tests"]
    for path in files:
        for name in re.findall(r"\b((?:{})/[\w/-]+\.md)\b".format("|".join(TOP)), path.read_text("utf-8")):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def named_paths(code: str) -> Iterator[str]:
    """Words of inline code that are paths of the repository: below a top folder, or modules."""
    for word in code.split():
        name = re.sub(r"(::\w+|:\d+)$", "", word).rstrip(",;").removeprefix("../").rstrip("/")
        if re.search(r"[*{}$<>…]|\.\.\.|//", name) or _PLACEHOLDER.search(name):
            continue
        if name in OF_OTHERS:
            continue
        if (name.split("/")[0] in TOP and "/" in name) or re.fullmatch(r"[\w/]+\.py", name):
            yield name


COMMANDS: Any = typer.main.get_command(app)


def told(path: Path) -> Iterator[list[str]]:
    """The words of every `maskfleet` command in the document's blocks, without redirections."""
    for language, text in document_blocks(path):
        prompt = {"console": r"^\$ ", "sh": "^", "bash": "^(?:until )?"}.get(language)
        for line in text.replace("\\\n", " ").splitlines():
            match = None if prompt is None else re.match(f"{prompt}maskfleet (.*)", line)
            if match:
                words = shlex.split(match[1].split(";")[0], comments=True)
                yield words[: words.index(">")] if ">" in words else words


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_blocks_have_these_options(path: Path) -> None:
    for words in told(path):
        command, rest = COMMANDS, list(words)
        while rest and hasattr(command, "commands"):
            if rest[0].startswith("-"):
                break
            assert rest[0] in command.commands, f"{path.relative_to(ROOT)}: maskfleet {shlex.join(words)}"
            command = command.commands[rest.pop(0)]
        if rest and not {"--help", "--version", "--install-completion"} & set(rest):
            command.make_context("maskfleet", rest)  # parses, and runs nothing


def test_examples_of_recipes_have_keys_that_exist() -> None:
    known = schema()
    found = 0
    for path in documents():
        for language, text in document_blocks(path):
            data = yaml.safe_load(text) if language == "yaml" else None
            if isinstance(data, dict) and data.keys() <= {key for key in known if "." not in key}:
                found += 1
                for key in keys(data):
                    assert key in known, f"{path.relative_to(ROOT)}: {key}"
    assert found > 2


def keys(data: object, path: str = "") -> Iterator[str]:
    """Dotted paths as the schema has them: names of sources, items of lists and bare words are `*`."""
    if isinstance(data, dict):
        for name, value in data.items():
            of_ones_own = path in (
                "corpus.sources",
                "phases.*.corpora",
                "phases.*.mixture.weights",
                "phases.*.weights",
            )
            below = f"{path}.{'*' if of_ones_own else name}".removeprefix(".")
            yield from () if of_ones_own else (below,)
            yield from keys(value, below)
    elif isinstance(data, list):
        for item in data:
            yield from keys(item, f"{path}.*")


def test_no_page_is_longer_than_one_reads() -> None:
    assert {path.name: len(path.read_text("utf-8").splitlines()) for path in GUIDE.glob("*.md")}
    long = [path.name for path in GUIDE.glob("*.md") if path.read_text("utf-8").count("\n") > 350]
    assert long == []


def test_every_page_of_the_guide_is_in_its_list() -> None:
    listed = set(_LINK.findall((GUIDE / "README.md").read_text("utf-8")))
    assert {path.name for path in GUIDE.glob("*.md")} - {"README.md"} <= listed
