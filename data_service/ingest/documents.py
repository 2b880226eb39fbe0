"""Documents of a piece of the input, in order: one reader per format, all streaming."""

from collections.abc import Iterator
from typing import assert_never

from data_service.errors import InputError
from data_service.ingest.arrow import read_arrow, read_parquet
from data_service.ingest.delimited import read_delimited
from data_service.ingest.jsonl import read_jsonl
from data_service.ingest.options import BuildOptions
from data_service.ingest.splits import Piece, Split
from data_service.ingest.text import BadRecord, Text
from data_service.ingest.txt import read_txt


def read_records(split: Split, options: BuildOptions) -> Iterator[Text | BadRecord]:
    """Every document of a split, empty ones included, and what cannot be one where bad records are to be skipped.

    Raises:
        InputError: bytes that are not what the file's name says; a bad record, where these are to be refused. Both name
            the file and the place.
        StoreError: a file that cannot be read.
    """
    for piece in split.pieces:
        yield from _read_piece(piece, options)


def read_documents(split: Split, options: BuildOptions) -> Iterator[Text]:
    """The documents alone. Raises as `read_records`."""
    return (record for record in read_records(split, options) if isinstance(record, Text))


def _read_piece(piece: Piece, options: BuildOptions) -> Iterator[Text | BadRecord]:
    match piece.file.format:
        case "txt":
            if options.pairs is not None:
                raise InputError(
                    f"{piece.file.uri}: a .txt file has no fields, and pairs need a query and a positive",
                    remedy="give JSON lines, CSV, TSV, Parquet or Arrow",
                )
            return read_txt(piece, options)
        case "jsonl":
            return read_jsonl(piece, options)
        case "csv" | "tsv":
            return read_delimited(piece, options)
        case "parquet":
            return read_parquet(piece, options)
        case "arrow":
            return read_arrow(piece, options)
        case other:
            assert_never(other)
