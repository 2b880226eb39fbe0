"""Reads the documents of a split, in order, from files of any format. `formats` reads files of lines, `tables` Parquet
and Arrow files."""

from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from data_service.errors import InputError
from data_service.ingest.files import SMALL_FILE_BYTES, fetch_small_file, use_fetched_bytes
from data_service.ingest.formats import read_delimited, read_jsonl, read_txt
from data_service.ingest.inputs import InputFile
from data_service.ingest.mds import read_mds
from data_service.ingest.mediawiki import read_dump
from data_service.ingest.options import BuildOptions
from data_service.ingest.records import BadRecord, TextRecord
from data_service.ingest.tars import read_tar, refuse_named_fields
from data_service.ingest.tasks import FilePiece, InputSplit
from data_service.ingest.warc import read_warc
from data_service.store.base import parallel_map


def read_records(split: InputSplit, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield every document of a split, empty ones included. If bad records are to be skipped, they are yielded as
    `BadRecord`.

    Raises:
        InputError: a file is not of the format that its name says; or a record is bad, and bad records are to be
            refused. The message names the file and the place.
        StoreError: a file cannot be read.
    """
    for piece in _prefetch_small_files(split.pieces):
        yield from _read_piece(piece, options)


def _prefetch_small_files(pieces: Sequence[FilePiece]) -> Iterator[FilePiece]:
    """Yield the pieces in order. Small files of an object store are fetched ahead in parallel, because each request
    waits for the store's latency."""
    if len(pieces) == 1:
        yield from pieces
        return
    for piece, data in zip(pieces, parallel_map(_fetch_if_small, pieces), strict=True):
        if data is None:
            yield piece
            continue
        with use_fetched_bytes(piece.file, data):
            yield piece


def _fetch_if_small(piece: FilePiece) -> bytes | None:
    """Return the bytes of a small file of an object store, which is fetched ahead; None for any other file."""
    return fetch_small_file(piece.file) if piece.file.size <= SMALL_FILE_BYTES and _is_remote(piece.file) else None


def _is_remote(file: InputFile) -> bool:
    return "://" in file.root


def read_documents(split: InputSplit, options: BuildOptions) -> Iterator[TextRecord]:
    """Yield the documents of a split, without bad records. Raises the errors of `read_records`."""
    return (record for record in read_records(split, options) if isinstance(record, TextRecord))


def _read_piece(piece: FilePiece, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    match piece.file.format:
        case "txt":
            refuse_named_fields(piece.file, options)
            return read_txt(piece, options)
        case "tar":
            return read_tar(piece, options)
        case "jsonl":
            return read_jsonl(piece, options)
        case "csv" | "tsv":
            return read_delimited(piece, options)
        case "parquet" | "arrow":
            from data_service.ingest import tables  # imports pyarrow, which other formats do not need

            read = tables.read_parquet if piece.file.format == "parquet" else tables.read_arrow
            return read(piece, options)
        case "mds":
            return read_mds(piece, options)
        case "warc":
            _refuse_pairs_and_words(piece, options)
            return read_warc(piece, options)
        case "mediawiki":
            _refuse_pairs_and_words(piece, options)
            return read_dump(piece, options)
        case other:
            assert_never(other)


def _refuse_pairs_and_words(piece: FilePiece, options: BuildOptions) -> None:
    if options.pairs is not None or options.word_fields:
        raise InputError(
            f"{piece.file.uri}: a .{piece.file.format} file holds running text alone, neither pairs nor words",
            remedy="give JSON lines, CSV, TSV, Parquet or Arrow",
        )


def find_cluster_mismatch(files: Iterable[InputFile]) -> tuple[InputFile, InputFile]:
    """Return the first two files that were not clustered together. There must be two such files."""
    from data_service.ingest.tables import read_clusters_digest

    first: dict[bytes, InputFile] = {}
    for file in files:
        first.setdefault(read_clusters_digest(file) if file.format == "parquet" else b"", file)
        if len(first) > 1:
            break
    one, other = first.values()
    return one, other
