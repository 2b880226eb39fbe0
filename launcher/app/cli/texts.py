"""Reads raw text for commands: samples to train a tokenizer on, the size of inputs (for the number of processes), and
YAML files of settings."""

import os
from collections.abc import Iterator, Sequence
from typing import TypeVar

import typer
from pydantic import BaseModel

from data_service.corpus.provenance import ProvenanceOptions
from data_service.errors import InputError, UserError
from data_service.ingest.documents import read_records
from data_service.ingest.encodings import UTF_8, is_garbled, odd_text_warning
from data_service.ingest.inputs import InputListing, list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.places import MAX_LISTED_RECORDS, with_line_numbers
from data_service.ingest.records import BadRecord
from data_service.ingest.tasks import InputSplit, plan_splits
from data_service.printable import one_line
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store_of_file
from data_service.tokenizers.loss import HARMLESS_KINDS, KINDS, WARNED_LOSS_SHARE, TextLoss, describe_loss
from launcher.errors import OptionError
from launcher.progress import BYTES_UNIT, work
from launcher.runtime.recipe.document import DocumentWording, parse_document, validate

_MODEL = TypeVar("_MODEL", bound=BaseModel)
_SMALL_INPUT_BYTES = 64 << 20  # inputs below this size are processed by one process
_MIN_SPLIT_BYTES = 256 << 10  # smallest sample, in bytes, that is worth opening a split for
_MIN_SHOWN_LOSS_SHARE = 0.00005  # smaller shares of characters would be printed as 0.00%


def list_text_files(inputs: Sequence[str], encoding: str = UTF_8) -> InputListing:
    """Return the inputs' files, and list on standard error the files that are not read.

    Raises:
        InputError, StoreError: as `list_inputs`.
    """
    listing = list_inputs(list(inputs), encoding)
    if listing.left_out:
        _print_warning(f"Files not read: {len(listing.left_out):,}", listing.left_out)
    return listing


def sample_texts(inputs: Sequence[str], options: BuildOptions, max_bytes: int, *, quiet: bool = False) -> Iterator[str]:
    """Yield documents from all over the inputs, at most `max_bytes` bytes in total. Compressed files are read only at
    their beginning.

    Evenly spaced splits (parts of input files) give equal shares; if one has less text, later ones give more. The last
    document of a share is cut. The choice depends only on names, sizes and text. Files and bad records that are
    left out are listed on standard error, with a warning if the text does not look like text. `quiet`: print nothing.

    Raises:
        InputError: there is no input, or its text cannot be read.
        StoreError: the store cannot be read.
    """
    files = (list_inputs(list(inputs), options.encoding) if quiet else list_text_files(inputs, options.encoding)).files
    splits = plan_splits(files, options)
    count = max(1, min(len(splits), max_bytes // _MIN_SPLIT_BYTES))
    chosen = [index * len(splits) // count for index in range(count)]
    others = sorted(set(range(len(splits))) - set(chosen))  # read if the chosen splits hold too little text
    skipped: list[BadRecord] = []
    left = max_bytes
    documents = odd = 0
    with work("reading text", min(max_bytes, sum(file.size for file in files)), BYTES_UNIT) as now:
        for position, index in enumerate([*chosen, *others]):
            share = left // max(1, count - position)
            for text in _sample_split(splits[index], options, share, skipped):
                left -= len(text.encode())
                documents, odd = documents + 1, odd + is_garbled(text)
                yield text
                now.set_done(max_bytes - left)
            if left <= 0:
                break
    if quiet:
        return
    if skipped:
        first = with_line_numbers(
            [bad.to_skipped_record() for bad in skipped[:MAX_LISTED_RECORDS]], [bad.place.file for bad in skipped]
        )
        _print_warning(f"Bad records left out: {len(skipped):,}", first)
    if warning := odd_text_warning(odd, documents):
        typer.echo(warning, err=True)


def _sample_split(split: InputSplit, options: BuildOptions, max_bytes: int, skipped: list[BadRecord]) -> Iterator[str]:
    """Yield documents of a split, at most `max_bytes` bytes in all."""
    for record in read_records(split, options):
        if max_bytes <= 0:
            return
        if isinstance(record, BadRecord):
            skipped.append(record)
            continue
        data = record.text.encode()
        yield record.text if len(data) <= max_bytes else data[:max_bytes].decode(errors="ignore")
        max_bytes -= len(data)


def print_text_loss(loss: TextLoss | None) -> None:
    """Print what a tokenizer loses of a text. Kinds of loss with a large share are warnings on standard error."""
    if loss is None:
        return
    much = loss.kinds_above(WARNED_LOSS_SHARE)
    for kind in KINDS:
        if kind in loss.lost and (kind not in HARMLESS_KINDS or loss.share(kind) >= _MIN_SHOWN_LOSS_SHARE):
            warning = "warning: " if kind in much else ""
            typer.echo(f"{warning}{one_line(describe_loss(loss, kind))}", err=kind in much)


def _print_warning(title: str, items: Sequence[object]) -> None:
    more = [f"and {len(items) - MAX_LISTED_RECORDS:,} more"] if len(items) > MAX_LISTED_RECORDS else []
    for line in [title, *(f"  {one_line(str(item))}" for item in items[:MAX_LISTED_RECORDS]), *more]:
        typer.echo(line, err=True)


def choose_worker_count(inputs: Sequence[str], requested: int | None) -> int:
    """Return the number of processes for a corpus build. Prints and raises as `list_text_files` does."""
    listing = list_text_files(inputs)
    return requested or default_worker_count(listing)


def default_worker_count(inputs: Sequence[str] | InputListing) -> int:
    """Return the default number of processes for a corpus build: one for a small input, because Ray takes seconds to
    start, else one per core.
    """
    listing = inputs if isinstance(inputs, InputListing) else list_inputs(list(inputs))
    size = sum(file.size for file in listing.files)
    return 1 if size < _SMALL_INPUT_BYTES else len(os.sched_getaffinity(0))


def read_nonblank_lines(path: str) -> list[str]:
    """Return the lines of a UTF-8 file, local or on S3, that are not blank. They are not stripped.

    Raises:
        InputError: there is no such file, it is not UTF-8, or all its lines are blank.
        StoreError: the file cannot be read.
    """
    lines = _read_text(path, InputError, "a text file with one entry per line").split("\n")
    listed = [line.removesuffix("\r") for line in lines if line.strip()]
    if not listed:
        raise InputError(f"{path} is empty", remedy="give a text file with one entry per line")
    return listed


def read_settings(path: str, model: type[_MODEL], wording: DocumentWording) -> _MODEL:
    """Return the settings in a YAML file, local or on S3.

    Raises:
        UserError: there is no such file, or its settings are invalid; the message gives line and path of each mistake.
            `wording` decides the subclass.
        StoreError: the file cannot be read.
    """
    return validate(model, parse_document(_read_text(path, wording.error, "a YAML file"), path, wording))


def _read_text(path: str, error_class: type[UserError], expected_form: str) -> str:
    """Return the text of a UTF-8 file, local or on S3. `expected_form`: the kind of file to give, for the remedy.
    Raises `error_class`, StoreError."""
    store, name = open_store_of_file(path)
    try:
        return store.get(name).decode("utf-8-sig")
    except KeyMissing as missing:
        raise error_class(f"there is no file {path}", remedy="check the path") from missing
    except UnicodeDecodeError as undecoded:
        raise error_class(f"{path} is not UTF-8 text", remedy=f"give {expected_form}") from undecoded


def read_provenance(path: str) -> ProvenanceOptions:
    """Return the settings in the YAML file of `--provenance`.

    Raises:
        OptionError: there is no such file, or its settings are invalid.
        StoreError: the file cannot be read.
    """
    return read_settings(
        path, ProvenanceOptions, DocumentWording("file of provenance", "infra/docs/data.md", OptionError)
    )
