"""Output of commands: human-readable numbers, tables, and files.

If the disk is full or standard output is closed, a command ends with a message, not a traceback.
"""

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING
from uuid import uuid4

from launcher.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNLIMITED_COLUMNS = 10_000  # width if the output is not a terminal, so that table cells are not wrapped


def human_count(value: float) -> str:
    """Return a count as text: 1234567 -> "1.2M"."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + unit
    return f"{value:.0f}"


def human_bytes(value: float) -> str:
    """Return a size as text: 1234567 -> "1.2 MiB"."""
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def hours_or_days(seconds: float) -> str:
    """Return seconds as text: 32040 -> "8.9 hours"; from two days on 200000 -> "2.31 days"."""
    return f"{seconds / 3600:.1f} hours" if seconds < 2 * 86400 else f"{seconds / 86400:.2f} days"


def human_duration(seconds: float) -> str:
    """Return seconds as text: 90061 -> "1d 1h"; 61 -> "1m 01s"; 5.25 -> "5.2s"."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    if minutes:
        return f"{minutes}m {whole % 60:02d}s"
    return f"{seconds:.1f}s"


def write_file(path: Path, text: str) -> None:
    """Write a whole local file, or leave the existing one unchanged. Folders above it are created.

    Raises OutputError if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device; or a folder, for which this raises OSError
            path.write_text(text, "utf-8")
        else:
            _write_atomically(path.resolve(), text)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}", remedy=_write_error_remedy(error.errno)
        ) from error


def _write_atomically(path: Path, text: str) -> None:
    fresh = path.with_name(f".{uuid4().hex}")  # no suffix to the file's name, which may have the maximum length
    try:
        if path.exists():
            fresh.touch(mode=0o600)  # the existing file may be private, so the new text must be, too
        fresh.write_text(text, "utf-8")
        if path.exists():
            shutil.copymode(path, fresh)
        os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


def _write_error_remedy(error_number: int | None) -> str:
    match error_number:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "free space or raise the quota, or write to another disk"
        case errno.EISDIR:
            return "give the name of a file, not of a folder"
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return "write to a folder for which you have write permission"
        case _:
            return "give the name of a file in a folder that exists or can be made"


def console() -> "Console":
    """Return the console for a command's output. It is as wide as the terminal; in a file or a pipe, lines have any
    length unless the environment sets COLUMNS.
    """
    from rich.console import Console

    found = Console()
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found = Console(width=_UNLIMITED_COLUMNS)
    return found


def print_table(table: "Table") -> None:
    """Print a table. Cells are never cut: on a narrow terminal they continue on the next line."""
    for column in table.columns:
        column.overflow = "fold"
    console().print(table)


@contextmanager
def raise_output_errors() -> Iterator[None]:
    """Raise OutputError, inside the `with` block, if standard output cannot be written. If its reader has ended,
    BrokenPipeError is raised as usual, which the command line treats as a normal end.
    """
    before, watched = sys.stdout, _CheckedOutput(sys.stdout)
    sys.stdout = watched
    try:
        yield
    finally:
        sys.stdout = before
        if watched.failure is None:
            watched.flush()


class StreamProxy:
    """A stream that forwards all methods that a subclass does not override to another stream."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class _CheckedOutput(StreamProxy):
    """Standard output that raises OutputError if it fails, and raises it again at every later write."""

    failure: OSError | None = None

    def write(self, text: str) -> int:
        with self._translate_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._translate_errors():
            self._stream.flush()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            if self.failure is not None:
                raise self.failure
            yield
        except OSError as error:
            if self.failure is None:
                self.failure = error
                _discard_buffer(self._stream)
            if error.errno == errno.EPIPE:
                raise
            problem = f"cannot write to standard output: {error.strerror or error}"
            raise OutputError(problem, remedy=_write_error_remedy(error.errno)) from error


def _discard_buffer(stream: IO[str]) -> None:
    """Drop the buffered output, so that the interpreter does not report the error again at its end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
