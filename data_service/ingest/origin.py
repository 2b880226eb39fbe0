"""Reads how the inputs of a build were prepared, from the statistics that `corpus prepare` wrote next to them."""

import hashlib
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.corpus.origin import IndexedSplit, Origin, PreparedInput, PreparedSource, StageCounts
from data_service.errors import InputError
from data_service.ingest.file_kinds import PREPARED_DOCUMENTS_PREFIX, STATISTICS_KEY
from data_service.ingest.inputs import InputFile
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store


class _LenientModel(BaseModel):
    """A model that ignores unknown entries."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _PreparedSourceFiles(_LenientModel):  # an entry of `inputs` in the settings of `corpus prepare`
    source: str
    files: list[str]


class _PrepareSettings(_LenientModel):  # the settings of `corpus prepare`
    inputs: list[_PreparedSourceFiles]
    stages: list[dict[str, object]]


class _SourceCounts(_LenientModel):  # counts of one source's documents
    documents_kept: int


class _PreparedFile(_LenientModel):  # a file that `corpus prepare` wrote
    size: int


class _Statistics(_LenientModel):
    """The entries of `statistics.json` that are read here. `data_service.prepare.statistics` writes it."""

    preparation: _PrepareSettings
    documents_read: int
    documents_kept: int
    stages: list[StageCounts]
    sources: dict[str, _SourceCounts]
    parts: dict[str, _PreparedFile]  # by key
    searched: list[IndexedSplit] = []  # evaluation splits whose texts were searched for


def read_origin(files: Sequence[InputFile]) -> Origin:
    """Return how the input files were prepared, and the number of files that were not prepared.

    Raises:
        InputError: a file lies among prepared documents but is not the one that was stored there, or the statistics of
            a preparation are damaged.
        StoreError: statistics cannot be read.
    """
    folders: dict[str, list[InputFile]] = {}
    for file in files:
        folder, inside, name = file.uri.rpartition(f"/{PREPARED_DOCUMENTS_PREFIX}")
        folders.setdefault(folder if inside and "/" not in name else "", []).append(file)
    unprepared = len(folders.pop("", ()))
    prepared = list[PreparedInput]()
    for folder, its in folders.items():
        found = _read_preparation(folder, its)
        unprepared += len(its) if found is None else 0
        prepared += [] if found is None else [found]
    return Origin(prepared=prepared, unprepared=unprepared)


def _read_preparation(folder: str, files: Sequence[InputFile]) -> PreparedInput | None:
    """Return the preparation that the statistics in `folder` describe; None without statistics."""
    place = f"{folder}/{STATISTICS_KEY}"
    try:
        data = open_store(folder).get(STATISTICS_KEY)
    except KeyMissing:
        return None
    try:
        statistics = _Statistics.model_validate_json(data)
    except ValidationError as error:
        raise InputError(
            f"{place} does not hold the statistics of prepared documents: {error.errors()[0]['msg']}",
            remedy="prepare the documents again, or move this file away to build without their history",
        ) from error
    _refuse_unlisted_files(files, statistics.parts, place)
    return PreparedInput(
        uri=folder,
        digest=hashlib.sha256(data).hexdigest(),
        files=len(files),
        all_files=sum(key.startswith(PREPARED_DOCUMENTS_PREFIX) for key in statistics.parts),
        documents_read=statistics.documents_read,
        documents_kept=statistics.documents_kept,
        sources={
            entry.source: PreparedSource(
                files=entry.files,
                documents=statistics.sources[entry.source].documents_kept if entry.source in statistics.sources else 0,
            )
            for entry in statistics.preparation.inputs
        },
        stages=statistics.stages,
        settings=statistics.preparation.stages,
        searched=statistics.searched,
    )


def _refuse_unlisted_files(files: Sequence[InputFile], parts: dict[str, _PreparedFile], place: str) -> None:
    """Raise InputError if a file is not one that the preparation wrote, by name and size."""
    for file in files:
        name = file.uri.rpartition("/")[2]
        part = parts.get(PREPARED_DOCUMENTS_PREFIX + name)
        if part is None or part.size != file.size:
            raise InputError(
                f"{file.uri} lies among prepared documents, but {place} does not list it with this size",
                remedy="move the file elsewhere, or prepare the documents again into an empty folder",
            )
