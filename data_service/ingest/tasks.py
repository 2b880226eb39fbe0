"""Tasks of a build, the splits of the input that they read, and their receipts, which store that a task is done.

A split is the text that one task reads and one shard holds. The cut of the inputs into splits is a pure function of
names, sizes, options, compression and encoding. So it does not depend on the number of workers or on
interruptions.

A task is frozen and picklable. It is finished once its receipt exists; the receipt is written last. A build that is
continued relies on receipts alone. Shards have the same keys in every build, and receipts store only their sizes. So
before shards are overwritten, by another build or a repeated task, their old receipts are deleted.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_service.corpus.manifest import BuildLayout
from data_service.ingest.files import is_uncompressed_utf8
from data_service.ingest.inputs import InputFile
from data_service.ingest.options import MIB, BuildOptions
from data_service.store.base import Store, parallel_map
from data_service.store.errors import KeyMissing

_COMPRESSION_RATIO = 3  # assumed bytes of text per byte of a compressed or Parquet file
_OPEN_COST_BYTES = 16 * 1024  # opening a file costs about as much as reading this many bytes
_MIN_SPLIT_BYTES = 4 * MIB  # smallest split, unless a smaller one is requested
_MIN_SPLITS = 16  # approximate number of splits of a small corpus
_MAX_WHOLE_SPLITS = 4  # a compressed file with text for at most so many splits is read by one task
# In these formats, records can only be found from the file's beginning.
_INDIVISIBLE_FORMATS = ("csv", "tsv", "arrow", "warc", "mds")


@dataclass(frozen=True, slots=True)
class FilePiece:
    """The documents that begin in bytes [start, stop) of a file; in a Parquet file, the row groups that begin there.

    A piece of CSV, TSV or Arrow, of a .txt file that is one document, or of a packed file that is not streamed, is the
    whole file. A packed file is compressed, in another encoding than UTF-8, or a tar, so that only a reader knows its
    text.

    Attributes:
        file: file that the piece is a part of.
        start, stop: range of bytes.
        plain_size: bytes of the file's text in UTF-8, if it is a big packed file, which is streamed; else 0. Then
            `start` and `stop` count these bytes, and a reader delivers the piece's text to the task.
        text: documents that begin in a streamed piece, once the reader has delivered them.
        text_start: byte of the decompressed file at which `text` begins.
    """

    file: InputFile
    start: int
    stop: int
    plain_size: int = 0
    text: bytes | None = field(default=None, repr=False)
    text_start: int = 0

    def contains_document_at(self, offset: int) -> bool:
        """Return whether a document that begins at byte `offset` of the text, after `start`, belongs to the piece."""
        whole = self.start == 0 and self.stop == self.file.size
        return whole or bool(self.plain_size) or offset < self.stop


@dataclass(frozen=True)
class InputSplit:
    """The input of one task: pieces of files, in input order."""

    pieces: tuple[FilePiece, ...]

    @property
    def size(self) -> int:
        """Number of stored bytes, compressed or not; for a streamed piece, number of bytes of text."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def streamed_piece(self) -> FilePiece | None:
        """The streamed piece of the split, which has no other pieces then; None for any other split."""
        return self.pieces[0] if self.pieces[0].plain_size else None

    @property
    def source(self) -> str:
        """Hash of the versions of the files, and of the bounds of a streamed piece, which depend on its text's size."""
        bounds = [f"{p.start} {p.stop} {p.plain_size}" for p in self.pieces if p.plain_size]
        return hash_strings([*(f"{p.file.version} {p.file.uri}" for p in self.pieces), *bounds])


def hash_strings(parts: Iterable[str | list[object]]) -> str:
    """Return the sha256 (hex) of a list's JSON, with one item in memory at a time."""
    content, separator = hashlib.sha256(b"["), ""
    for part in parts:
        content.update(f"{separator}{json.dumps(part)}".encode())
        separator = ", "
    content.update(b"]")
    return content.hexdigest()


def streamed_files(files: tuple[InputFile, ...], options: BuildOptions) -> list[InputFile]:
    """Return the packed files that are too big for one task, and that a reader can cut between documents."""
    most = _MAX_WHOLE_SPLITS * _target_split_bytes(files, options)
    big = [
        file for file in files if _estimate_text_bytes(file, file.size) > most and not _is_indivisible(file, options)
    ]
    return [file for file in big if file.format != "parquet" and _is_packed(file)]


def plan_splits(
    files: tuple[InputFile, ...], options: BuildOptions, plain_sizes: Mapping[str, int] | None = None
) -> list[InputSplit]:
    """Return the inputs, in order, cut into splits of about the same amount of text.

    `plain_sizes`: bytes of text of the `streamed_files`, by URI. Compressed files that are not in it are not cut.
    """
    target, known = _target_split_bytes(files, options), plain_sizes or {}
    splits: list[InputSplit] = []
    pieces: list[FilePiece] = []
    filled = 0
    for piece in (piece for file in files for piece in _cut_into_pieces(file, target, options, known.get(file.uri, 0))):
        weight = _estimate_text_bytes(piece.file, piece.stop - piece.start)
        alone = piece.plain_size or (pieces and pieces[-1].plain_size)
        if pieces and (alone or filled + weight > target):
            splits.append(InputSplit(tuple(pieces)))
            pieces, filled = [], 0
        pieces.append(piece)
        filled += weight
    if pieces:
        splits.append(InputSplit(tuple(pieces)))
    return splits


def _target_split_bytes(files: tuple[InputFile, ...], options: BuildOptions) -> int:
    """Return the number of bytes of text that a split should have."""
    total = sum(_estimate_text_bytes(file, file.size) for file in files)
    return min(options.split_bytes, max(_MIN_SPLIT_BYTES, total // _MIN_SPLITS))


def _cut_into_pieces(file: InputFile, target: int, options: BuildOptions, plain_size: int) -> list[FilePiece]:
    """Return the pieces of a file, each of at most about `target` bytes of text; one piece if it cannot be cut."""
    if plain_size:
        size, text, whole = plain_size, plain_size, False
    else:
        size, text = file.size, _estimate_text_bytes(file, file.size)
        cut = text > target and file.compression == "" and not _is_indivisible(file, options)
        whole = not cut or (file.format != "parquet" and _is_packed(file))
    count = 1 if whole else max(1, -(-text // target))
    cuts = [size * i // count for i in range(count + 1)]
    return [FilePiece(file, start, stop, plain_size) for start, stop in pairwise(cuts)]


def _is_indivisible(file: InputFile, options: BuildOptions) -> bool:
    return file.format in _INDIVISIBLE_FORMATS or (file.format == "txt" and options.txt_documents == "file")


def _is_packed(file: InputFile) -> bool:
    return file.format == "tar" or not is_uncompressed_utf8(file)


def _estimate_text_bytes(file: InputFile, size: int) -> int:
    expanded = size if file.compression == "" and file.format != "parquet" else size * _COMPRESSION_RATIO
    return expanded + _OPEN_COST_BYTES


@dataclass(frozen=True)
class BuildTask(ABC):
    """Task `index` of a stage. When it is finished, it leaves a receipt.

    Attributes:
        layout: keys that the task reads and writes.
        source: hash of the data that the task reads. If an input changes, only tasks that depend on it are repeated.
        stage: name of the stage in the key of the receipt.
    """

    layout: BuildLayout
    index: int
    source: str

    stage: ClassVar[str]

    @property
    def receipt_key(self) -> str:
        return self.layout.receipt_key(self.stage, self.index)

    @property
    def accepted_sources(self) -> tuple[str, ...]:
        """Hashes that a receipt's source may have for the receipt to count."""
        return (self.source,)

    @property
    @abstractmethod
    def input_bytes(self) -> int:
        """Number of bytes that the task reads."""


@dataclass(frozen=True)
class SplitTask(BuildTask):
    """A task that reads split `index` of the input."""

    split: InputSplit
    options: BuildOptions

    @property
    def input_bytes(self) -> int:
        return self.split.size

    def with_piece(self, piece: FilePiece) -> Self:
        """Return the same task with `piece`, which holds the text of its streamed piece."""
        return replace(self, split=InputSplit((piece,)))


class TaskReceipt(BaseModel):
    """The receipt of a finished task.

    Attributes:
        source: hash of the data that the task read. The receipt counts if it is one of `BuildTask.accepted_sources`.
        files: sizes in bytes of the objects that the task wrote, by key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    files: dict[str, int] = Field(default_factory=dict)


T = TypeVar("T", bound=BuildTask)
R = TypeVar("R", bound=TaskReceipt)


def run_task(function: Callable[[T, Store], R], task: T) -> R:
    """Run `function` on a task and the store at the root of the output; store and return the receipt.

    The receipt is stored last, when all objects that it names exist.
    """
    store = task.layout.open_output()
    receipt = function(task, store)
    store.put(task.receipt_key, receipt.model_dump_json().encode())
    return receipt


def put_unless_empty(store: Store, key: str, data: bytes | memoryview) -> dict[str, int]:
    """Store an object unless it is empty; return its size by key, for the receipt."""
    if not data:
        return {}
    store.put(key, data)
    return {key: len(data)}


def find_receipts(store: Store, tasks: Sequence[BuildTask], receipt_type: type[R]) -> list[R | None]:
    """Return the receipt of each task; None if the task must be done.

    A receipt counts if the task accepts its source, and all objects that it names exist with their sizes. Others are
    deleted: if the task were killed before its new receipt, and its input were restored, the old receipt would count,
    although the task has replaced its objects.
    """
    written = _list_sizes(store, [task.receipt_key for task in tasks])

    def read_valid_receipt(task: BuildTask) -> R | None:
        found = _read_receipt(store, task.receipt_key, receipt_type) if task.receipt_key in written else None
        return found if found is not None and found.source in task.accepted_sources else None

    receipts = list(parallel_map(read_valid_receipt, tasks))
    stored = _list_sizes(store, [name for receipt in receipts if receipt for name in receipt.files])
    valid = [
        receipt if receipt and all(stored.get(name) == size for name, size in receipt.files.items()) else None
        for receipt in receipts
    ]
    keys = [task.receipt_key for task, receipt in zip(tasks, valid, strict=True) if receipt is None]
    store.delete_many([key for key in keys if key in written])
    return valid


def _read_receipt(store: Store, key: str, kind: type[R]) -> R | None:
    try:
        return kind.model_validate_json(store.get(key))
    except (KeyMissing, ValidationError):
        return None


def _list_sizes(store: Store, keys: Iterable[str]) -> dict[str, int]:
    """Return the sizes of all objects in the folders of `keys`, by key. Listing takes one request per thousand."""
    folders = {key.rpartition("/")[0] + "/" for key in keys}
    return {entry.key: entry.size for folder in folders for entry in store.list(folder)}
