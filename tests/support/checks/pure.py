"""Which tests are pure: no process, no server, no Ray, no training, no whole command or build.

They are found by their imports; nobody keeps a list. A test file is pure if what it imports, followed through our own
modules, reaches nothing of `FOREIGN` and none of `WHOLE`, and what it imports itself starts no process. Of files below
tests/, imports inside functions count, too, `os.fork` and `STARTS`. While a pure test runs, `guarded` makes it fail
where it starts a process, talks over a network or imports what is foreign.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOREIGN = frozenset({"ray", "deepspeed", "moto", "transformers"})
STARTS = frozenset({"subprocess", "multiprocessing", "http", "socket", "socketserver", "sentence_transformers"})
WHOLE = frozenset(
    ROOT / module
    for module in (
        "data_service/ingest/build.py",
        "data_service/tokenizers/train.py",
        "launcher/app/cli/main.py",
        "launcher/after/embed/train.py",
        "launcher/after/finetune/run.py",
    )
)
"""Modules of ours that build, train or run from end to end."""
FORKS = re.compile(r"\bos\.fork\b")
FIXTURES = frozenset({"moto_server", "ceph_server", "gcs_server", "azurite_server", "inputs"})
"""That start servers or build: a test that asks for one, through whatever other, is not pure."""
_IMPORTS = re.compile(r"^( *)(?:from ([\w.]+) import (\([^)]*\)|.*)|import (.*))", re.MULTILINE)
_EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
_guards: list[str] = []


class NotPure(BaseException):
    """A pure test has done what it must not; no `except Exception` keeps it back."""


@cache
def is_pure(file: Path) -> bool:
    """Of a test file in this repository."""
    if any("subprocess" in _imports(one) for one in _ours(file)):  # what it tests may start a process
        return False
    return reached(file).isdisjoint(WHOLE) and not any(_foreign(one) for one in reached(file))


@cache
def reached(file: Path) -> set[Path]:
    """The file and all files of ours that importing it imports."""
    found, left = {file}, [file]
    while left:
        new = _ours(left.pop()) - found
        found |= new
        left += new
    return found


@cache
def _ours(file: Path) -> set[Path]:
    return {path for name in _imports(file) if (path := _file_of(name)) is not None}


@cache
def _foreign(file: Path) -> bool:
    if _is_test(file) and FORKS.search(file.read_text("utf-8")):
        return True
    names = {name.partition(".")[0] for name in _imports(file)}
    return bool(names & (FOREIGN | STARTS if _is_test(file) else FOREIGN))


@cache
def _imports(file: Path) -> frozenset[str]:
    """Names of modules, and of what may be modules. Of the packages' files, only those of statements on the outside."""
    found: set[str] = set()
    for indent, module, names, modules in _IMPORTS.findall(file.read_text("utf-8")):
        if indent and not _is_test(file):
            continue
        ours = re.findall(r"[a-zA-Z_][\w.]*", re.sub(r"#.*| as \w+", "", names or modules))
        found |= {f"{module}.{name}" for name in ours} | {module} if module else set(ours)
    return frozenset(found)


@cache
def _file_of(module: str) -> Path | None:
    for place in (ROOT, ROOT / "tests/bench"):
        path = (place / module.replace(".", "/")).with_suffix(".py")
        if path.is_file():
            return path
    return None


def _is_test(file: Path) -> bool:
    return file.is_relative_to(ROOT / "tests")


@contextmanager
def guarded(test: str) -> Iterator[None]:
    """Raises NotPure where `test` starts a process, reaches for a network or imports what is foreign."""
    _watch()
    _guards.append(test)
    try:
        yield
    finally:
        _guards.pop()


@cache
def _watch() -> None:
    sys.addaudithook(_audit)  # for as long as the process lives


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if not _guards:
        return
    if event in _EVENTS:
        raise NotPure(f"{_guards[-1]} starts a process: {event} {arguments[:2]}")
    if event in ("socket.bind", "socket.connect") and isinstance(arguments[1], tuple):
        raise NotPure(f"{_guards[-1]} talks over a network: {event} {arguments[1]}")
    if event == "import" and str(arguments[0]).partition(".")[0] in FOREIGN:
        raise NotPure(f"{_guards[-1]} imports {arguments[0]}")
