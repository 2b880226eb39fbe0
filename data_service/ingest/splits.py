"""Cuts the inputs into splits: what one task reads and one shard holds.

The cut is a pure function of names, sizes, options and of how the text is stored, so it does not depend on
the number of workers or on interruptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from data_service.ingest.files import is_stored_plainly
from data_service.ingest.inputs import InputFile
from data_service.ingest.options import MIB, BuildOptions

_EXPANSION = 3  # bytes of text that a byte of a compressed or Parquet file is taken for
_PER_FILE = 16 * 1024  # opening a file costs about as much as reading this many bytes
_SMALLEST = 4 * MIB  # small corpora are cut into about 16 splits, but not below this
_SPLITS = 16
_WHOLE = 4  # a compressed file of more splits than this is cut; below, that is not worth a second task
_UNCUT = ("csv", "tsv", "arrow")  # where a record begins is only known from the beginning


@dataclass(frozen=True)
class FilePiece:
    """The documents that begin in bytes [start, stop) of a file; in a Parquet file, the row groups that do.

    A piece of CSV, TSV or Arrow, of a .txt file that is one document, or of a packed file that is not streamed, is the
    whole file. Packed are compressed files and those in another encoding than UTF-8: only a reader knows their text.

    Attributes:
        plain_size: 0, or for a piece of a big packed file, which is streamed: the bytes of that file's text in UTF-8.
            `start` and `stop` then count these bytes, and a reader hands the task the piece's text.
        text: of a streamed piece, the documents that begin in it, once the reader has handed them over.
        text_start: the byte of the decompressed file at which `text` begins.
    """

    file: InputFile
    start: int
    stop: int
    plain_size: int = 0
    text: bytes | None = field(default=None, repr=False)
    text_start: int = 0

    def holds(self, offset: int) -> bool:
        """Whether a document that begins at byte `offset` of the text, behind `start`, is in the piece."""
        whole = self.start == 0 and self.stop == self.file.size
        return whole or bool(self.plain_size) or offset < self.stop


@dataclass(frozen=True)
class Split:
    """Pieces in input order."""

    pieces: tuple[FilePiece, ...]

    @property
    def size(self) -> int:
        """Bytes stored, before any decompression; of a streamed piece, bytes of text."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def streamed(self) -> FilePiece | None:
        """The streamed piece, which is always alone in its split; None for any other split."""
        return self.pieces[0] if self.pieces[0].plain_size else None


def streamed_files(files: tuple[InputFile, ...], options: BuildOptions) -> list[InputFile]:
    """Packed files that are too big for one task, if their documents end where lines or blank lines do."""
    most = _WHOLE * _target(files, options)
    big = [file for file in files if _weight(file, file.size) > most and not _is_uncut(file, options)]
    return [file for file in big if file.format != "parquet" and not is_stored_plainly(file)]


def plan_splits(
    files: tuple[InputFile, ...], options: BuildOptions, plain_sizes: Mapping[str, int] | None = None
) -> list[Split]:
    """All of the inputs, in order, in splits of about the same amount of text.

    `plain_sizes`: bytes of text of the `streamed_files`, by URI. Without them these files are not cut.
    """
    target, known = _target(files, options), plain_sizes or {}
    splits: list[Split] = []
    pieces: list[FilePiece] = []
    filled = 0
    for piece in (piece for file in files for piece in _cut(file, target, options, known.get(file.uri, 0))):
        weight = _weight(piece.file, piece.stop - piece.start)
        alone = piece.plain_size or (pieces and pieces[-1].plain_size)
        if pieces and (alone or filled + weight > target):
            splits.append(Split(tuple(pieces)))
            pieces, filled = [], 0
        pieces.append(piece)
        filled += weight
    if pieces:
        splits.append(Split(tuple(pieces)))
    return splits


def _target(files: tuple[InputFile, ...], options: BuildOptions) -> int:
    """Bytes of text that a split should have."""
    total = sum(_weight(file, file.size) for file in files)
    return min(options.split_bytes, max(_SMALLEST, total // _SPLITS))


def _cut(file: InputFile, target: int, options: BuildOptions, plain_size: int) -> list[FilePiece]:
    if plain_size:
        size, text, whole = plain_size, plain_size, False
    else:
        size, text = file.size, _weight(file, file.size)
        cut = text > target and file.compression == "" and not _is_uncut(file, options)
        whole = not cut or (file.format != "parquet" and not is_stored_plainly(file))
    count = 1 if whole else max(1, -(-text // target))
    cuts = [size * i // count for i in range(count + 1)]
    return [FilePiece(file, start, stop, plain_size) for start, stop in pairwise(cuts)]


def _is_uncut(file: InputFile, options: BuildOptions) -> bool:
    return file.format in _UNCUT or (file.format == "txt" and options.txt_documents == "file")


def _weight(file: InputFile, size: int) -> int:
    expanded = size if file.compression == "" and file.format != "parquet" else size * _EXPANSION
    return expanded + _PER_FILE
