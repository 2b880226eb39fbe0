"""What commands print and write. A disk or a standard output that takes no more ends in a message, not a traceback."""

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from launcher.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNLIMITED = 10_000  # columns where nobody reads on a screen: a table is as wide as it is


def write_file(path: Path, text: str) -> None:
    """Write a local file whole, or leave what was there; folders above it are made.

    Raises OutputError if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a folder, which is refused, or a device
            path.write_text(text, "utf-8")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}", remedy=_remedy(error.errno)
        ) from error


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:64]}-", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    """This process's; the system has no call that only asks."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _remedy(number: int | None) -> str:
    match number:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "free space or raise the quota, or write to another disk"
        case errno.EISDIR:
            return "give the name of a file, not of a folder"
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return "write to a folder in which you may"
        case _:
            return "give the name of a file in a folder that exists or can be made"


def console() -> "Console":
    """For what a command prints: as wide as the terminal; in a file or a pipe as wide as it is, unless the environment
    sets COLUMNS.
    """
    from rich.console import Console

    found = Console()
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found = Console(width=_UNLIMITED)
    return found


def print_table(table: "Table") -> None:
    """No cell is cut: on a narrow terminal it goes on in the next line."""
    for column in table.columns:
        column.overflow = "fold"
    console().print(table)


@contextmanager
def watched_output() -> Iterator[None]:
    """While this lasts, a standard output that takes no more raises OutputError. One whose reader has ended raises
    BrokenPipeError as ever, which the command line takes for the end that it is.
    """
    before, watched = sys.stdout, _Watched(sys.stdout)
    sys.stdout = watched
    try:
        yield
    finally:
        sys.stdout = before
        if watched.failure is None:
            watched.flush()


class _Watched:
    """Standard output whose failures are told as ours: the first one again with everything that is written later."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._told():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._told():
            self._stream.flush()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            if self.failure is not None:
                raise self.failure
            yield
        except OSError as error:
            if self.failure is None:
                self.failure = error
                _drop_the_rest(self._stream)
            if error.errno == errno.EPIPE:
                raise
            problem = f"standard output takes no more: {error.strerror or error}"
            raise OutputError(problem, remedy=_remedy(error.errno)) from error


def _drop_the_rest(stream: IO[str]) -> None:
    """What is buffered goes nowhere, so that the interpreter's end does not complain once more."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
