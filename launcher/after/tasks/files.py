"""The files of a task: found in a folder or below an s3:// URI, decompressed and decoded line by line."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from data_service.ingest.encodings import UTF_8
from data_service.ingest.files import open_text
from data_service.ingest.inputs import Compression, InputFile
from data_service.ingest.records import guessed_remedy
from data_service.store.open import open_store
from launcher.errors import TaskError

_MARK = "\ufeff"  # byte order mark
_PACKED: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}


@dataclass(frozen=True)
class TaskFolder:
    """The place of a task's files.

    Attributes:
        root: folder or s3:// URI to which paths are relative.
        task: name of the task, for messages.
        published: place where the files are published, for messages.
    """

    root: str
    task: str
    published: str

    def find(self, path: str) -> InputFile:
        """Return the file at `path`, or at `path` with .gz or .zst after it.

        Raises:
            TaskError: if there is none.
            StoreError: if the store does not answer.
        """
        whole = self._whole(path)
        base, _, name = whole.rpartition("/")
        store = open_store(base or "/")
        for ending in ("", *_PACKED):
            entry = store.entry(name + ending)
            if entry is not None:
                compression: Compression = next(
                    (kind for suffix, kind in _PACKED.items() if entry.key.endswith(suffix)), ""
                )
                return InputFile(store.uri, entry.key, entry.size, "txt", compression, entry.version)
        raise TaskError(
            f"{whole} is not there; the task {self.task} needs this file",
            remedy=f"get the file from {self.published}, and pass its folder with --data (Maskfleet downloads nothing)",
        )

    def _whole(self, path: str) -> str:
        if "://" in path:
            return path
        if "://" in self.root:
            return f"{self.root.rstrip('/')}/{path}"
        return os.path.abspath(os.path.join(os.path.expanduser(self.root), path))


@dataclass(frozen=True, slots=True)
class FilePosition:
    """The position of a line (counted from 1) or a row (counted from 0) in a file."""

    file: InputFile
    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.file.uri}, {self.unit} {self.number}"


def read_lines(file: InputFile, encoding: str) -> Iterator[str]:
    """Yield the lines of a file without their ends. Only a line feed ends a line, since texts hold other separators.

    Raises:
        TaskError: if bytes are not in `encoding`.
        InputError: if compressed data are damaged.
    """
    file = replace(file, encoding=encoding)
    with open_text(file) as stream:
        for number, raw in enumerate(stream, 1):
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                raise _not_text(FilePosition(file, "line", number), raw, error) from error
            yield (line.removeprefix(_MARK) if number == 1 else line).removesuffix("\n").removesuffix("\r")


def _not_text(place: FilePosition, raw: bytes, error: UnicodeDecodeError) -> TaskError:
    """Return the error for the bytes `raw` of a line that cannot be decoded. In UTF-8 it names the byte, in other
    encodings only the line."""
    encoding = place.file.encoding
    which = (
        f"byte {error.start} (0x{raw[error.start]:02x}) is" if encoding == UTF_8 else "it has bytes that are"
    )
    remedy = "convert the file to UTF-8, or set the task's `encoding`"
    return TaskError(
        f"{place}: {which} not {encoding}",
        remedy=guessed_remedy(place.file, raw, remedy, "write `encoding: {}` into the task"),
    )


def read_whole(file: InputFile, encoding: str) -> bytes:
    """Return the whole text of a file in UTF-8, decompressed. Raises InputError if compressed data are damaged."""
    with open_text(replace(file, encoding=encoding)) as stream:
        return stream.read()
