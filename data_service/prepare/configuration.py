"""The settings of a preparation: the content of PREPARE.yaml."""

import hashlib
import json
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from data_service.errors import InputError, PrepareError
from data_service.formats import StrictRecord
from data_service.ingest.configuration import FILE_VERSIONS_ENTRY, SPLIT_HASHES_ENTRY
from data_service.ingest.encodings import UTF_8, python_encoding_name
from data_service.ingest.file_kinds import PREPARATION_KEY
from data_service.ingest.inputs import InputListing, list_inputs, refuse_inputs_in_output, require_packages
from data_service.ingest.options import MIB, BuildOptions, describe_differences
from data_service.ingest.tasks import hash_strings
from data_service.prepare.contamination import Decontaminate
from data_service.prepare.stages import NearDuplicates, Stage, cuts_text, stage_labels
from data_service.store.base import Store

RULES_VERSION = 3  # version of the stages' rules; raised when the same inputs and settings would give another output
_ENTRIES_WITHOUT_EFFECT = (FILE_VERSIONS_ENTRY, SPLIT_HASHES_ENTRY)  # entries that do not determine the output
FieldName = Literal["id", "url", "licence", "language", "date"]  # keys of `InputSource.fields`
ConstantField = Literal["url", "licence", "language", "date"]  # keys of `InputSource.constants`


class ReadOptions(BuildOptions):
    """Options of reading: those of a corpus build, and in `metadata` the fields to read in addition to the text."""

    metadata: tuple[str, ...] = ()

    @property
    def metadata_fields(self) -> tuple[str, ...]:
        return self.metadata

    @property
    def required_fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.text_field, *self.metadata)))


class InputSource(StrictRecord):
    """One source of documents.

    Attributes:
        source: name of the source, which every document records.
        files: files, folders and globs, local or s3://.
        text: field of a JSON line, or column of a table, that holds the text.
        fields: names of the fields that hold a document's id, URL, licence, language and date. Without an id field the
            id is made of the source, the file and the document's position in it.
        constants: values for documents whose own fields lack them.
        txt_documents, encoding, delimiter, on_bad_bytes, on_bad_records, max_document_bytes: as in `BuildOptions`.
    """

    source: str = Field(min_length=1, max_length=100)
    files: tuple[str, ...] = Field(min_length=1)
    text: str = "text"
    fields: dict[FieldName, str] = Field(default_factory=dict)
    constants: dict[ConstantField, str] = Field(default_factory=dict)
    txt_documents: Literal["file", "blank_line"] = "file"
    encoding: str = UTF_8
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    on_bad_bytes: Literal["error", "replace"] = "error"
    on_bad_records: Literal["error", "skip"] = "error"
    max_document_bytes: int = Field(default=16 * MIB, ge=1)

    @field_validator("encoding")
    @classmethod
    def _normalise_encoding(cls, name: str) -> str:
        return python_encoding_name(name)

    def read_options(self, chunk_bytes: int) -> ReadOptions:
        """Return the options for reading the files of this source."""
        return ReadOptions(
            text_field=self.text,
            metadata=tuple(dict.fromkeys(self.fields.values())),
            txt_documents=self.txt_documents,
            encoding=self.encoding,
            delimiter=self.delimiter,
            on_bad_bytes=self.on_bad_bytes,
            on_bad_records=self.on_bad_records,
            split_bytes=chunk_bytes,
            max_document_bytes=self.max_document_bytes,
        )


class Preparation(StrictRecord):
    """The settings of `corpus prepare`.

    Attributes:
        inputs: the sources; the first of equal documents, in this order, is kept.
        stages: the stages in order of application.
        chunk_bytes: bytes of text per task, which writes one file of kept documents.
    """

    inputs: tuple[InputSource, ...] = Field(min_length=1)
    stages: tuple[Stage, ...] = ()
    chunk_bytes: int = Field(default=64 * MIB, ge=4096)

    @model_validator(mode="after")
    def _check_source_names(self) -> Self:
        names = [entry.source for entry in self.inputs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two inputs are called {twice!r}: give each source another name")
        return self

    @model_validator(mode="after")
    def _check_single_cluster_stage(self) -> Self:
        stages = [stage for stage in self.stages if isinstance(stage, NearDuplicates) and stage.keep == "all"]
        if len(stages) > 1:
            raise ValueError(
                "two stages near_duplicates have `keep: all`, but a document can record only one cluster: "
                "set `keep: all` in one stage"
            )
        return self

    @model_validator(mode="after")
    def _check_nothing_cuts_after_search(self) -> Self:
        """Refuse stages that cut text after `decontaminate`: the text around a cut may form an evaluation text."""
        labels = stage_labels(self.stages)
        last = {stage.sha256: place for place, stage in enumerate(self.stages) if isinstance(stage, Decontaminate)}
        for place in last.values():
            cutting = next((i for i in range(place + 1, len(labels)) if cuts_text(self.stages[i])), None)
            if cutting is not None:
                raise ValueError(
                    f"the stage {labels[cutting]} cuts text after {labels[place]}, and the remaining text may form "
                    f"an evaluation text: add or move a stage `decontaminate` with this index after {labels[cutting]}"
                )
        return self


def list_input_files(preparation: Preparation, store: Store) -> list[InputListing]:
    """Return the files of each input.

    Raises:
        InputError: a pattern matches no file, a file belongs to two inputs, or the output holds an input.
        StoreError: a store cannot be listed.
    """
    listings = [list_inputs(list(entry.files), entry.encoding) for entry in preparation.inputs]
    owners: dict[str, str] = {}
    for entry, listing in zip(preparation.inputs, listings, strict=True):
        refuse_inputs_in_output(store, listing)
        for file in listing.files:
            require_packages(file)
            owner = owners.setdefault(file.uri, entry.source)
            if owner != entry.source:
                raise InputError(
                    f"{file.uri} is an input of both {owner!r} and {entry.source!r}",
                    remedy="name each file under one source",
                )
    return listings


def describe_identity(preparation: Preparation, listings: list[InputListing]) -> dict[str, object]:
    """Return the settings and inputs that determine the output, as JSON values. The entry FILE_VERSIONS_ENTRY (versions
    of the input files) does not determine it (see `ingest.configuration.make_configuration`)."""
    names = [[[file.uri, file.size] for file in listing.files] for listing in listings]
    return {
        "rules": RULES_VERSION,
        **preparation.model_dump(mode="json", exclude_none=True),
        "files": sum(len(listing.files) for listing in listings),
        "bytes": sum(file.size for listing in listings for file in listing.files),
        "listing": hashlib.sha256(json.dumps(names).encode()).hexdigest(),
        FILE_VERSIONS_ENTRY: hash_strings(file.version for listing in listings for file in listing.files),
    }


def short_hash(configuration: dict[str, object]) -> str:
    """Return a short hash of the entries of a configuration (`describe_identity`) that determine the output."""
    decisive = {key: value for key, value in configuration.items() if key not in _ENTRIES_WITHOUT_EFFECT}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def claim_output(store: Store, configuration: dict[str, object]) -> None:
    """Reserve the output for this preparation: store its configuration there.

    Raises:
        PrepareError: the output holds documents of another preparation, complete or not.
    """
    text = json.dumps(configuration, indent=1).encode()
    if store.put_if_absent(PREPARATION_KEY, text):
        return
    there = json.loads(store.get(PREPARATION_KEY))
    check_same_configuration(store, there, configuration, "half-prepared documents")


def check_same_configuration(
    store: Store, stored: dict[str, object], requested: dict[str, object], content: str
) -> None:
    """Raise PrepareError if the output has other settings or inputs. `content`: what it holds, for the message."""
    lines = describe_differences(stored, requested, _ENTRIES_WITHOUT_EFFECT)
    if lines:
        raise PrepareError(
            "\n".join([f"{store.uri} holds {content} of another preparation:", *lines]),
            remedy="give another OUT folder, or delete these files; to continue, give the same settings and inputs",
        )
