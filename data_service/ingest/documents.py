"""Documents of a piece of the input, in order: one reader per format, all streaming."""

from collections.abc import Iterator
from typing import assert_never

from data_service.ingest.jsonl import read_jsonl
from data_service.ingest.options import BuildOptions
from data_service.ingest.parquet import read_parquet
from data_service.ingest.splits import Split
from data_service.ingest.text import Text
from data_service.ingest.txt import read_txt


def read_documents(split: Split, options: BuildOptions) -> Iterator[Text]:
    """Every document of a split, empty ones included.

    Raises:
        InputError: bytes that are not what the file's name says, naming the file and the place.
        StoreError: a file that cannot be read.
    """
    for piece in split.pieces:
        match piece.file.format:
            case "txt":
                yield from read_txt(piece, options)
            case "jsonl":
                yield from read_jsonl(piece, options)
            case "parquet":
                yield from read_parquet(piece, options)
            case other:
                assert_never(other)
