"""Cuts the inputs into splits: what one task reads and one shard holds.

A pure function of names, sizes and options: any number of workers, today or after an interruption, cut alike.
"""

from dataclasses import dataclass
from itertools import pairwise

from data_service.ingest.inputs import InputFile
from data_service.ingest.options import MIB, BuildOptions

_EXPANSION = 3  # bytes of text that a byte of a compressed or Parquet file is taken for
_PER_FILE = 16 * 1024  # opening a file costs about as much as reading this many bytes
_SMALLEST = 4 * MIB  # small corpora are cut into about 16 splits, but not below this
_SPLITS = 16
_UNCUT = ("csv", "tsv", "arrow")  # where a record begins is only known from the beginning


@dataclass(frozen=True)
class Piece:
    """The documents that begin in bytes [start, stop) of a file; in a Parquet file, the row groups that do.

    A piece of a compressed file, of CSV, TSV or Arrow, or of a .txt file that is one document, is the whole file.
    """

    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True)
class Split:
    """Pieces in input order."""

    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes stored, before any decompression."""
        return sum(piece.stop - piece.start for piece in self.pieces)


def plan_splits(files: tuple[InputFile, ...], options: BuildOptions) -> list[Split]:
    """All of the inputs, in order, in splits of about the same amount of text."""
    total = sum(_weight(file, file.size) for file in files)
    target = min(options.split_bytes, max(_SMALLEST, total // _SPLITS))
    splits: list[Split] = []
    pieces: list[Piece] = []
    filled = 0
    for piece in (piece for file in files for piece in _cut(file, target, options)):
        weight = _weight(piece.file, piece.stop - piece.start)
        if pieces and filled + weight > target:
            splits.append(Split(tuple(pieces)))
            pieces, filled = [], 0
        pieces.append(piece)
        filled += weight
    if pieces:
        splits.append(Split(tuple(pieces)))
    return splits


def _cut(file: InputFile, target: int, options: BuildOptions) -> list[Piece]:
    one_document = file.format == "txt" and options.txt_documents == "file"
    whole = one_document or file.compression != "" or file.format in _UNCUT
    count = 1 if whole else max(1, -(-_weight(file, file.size) // target))
    cuts = [file.size * i // count for i in range(count + 1)]
    return [Piece(file, start, stop) for start, stop in pairwise(cuts)]


def _weight(file: InputFile, size: int) -> int:
    expanded = size if file.compression == "" and file.format != "parquet" else size * _EXPANSION
    return expanded + _PER_FILE
