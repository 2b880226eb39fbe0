"""`prepare` reads documents, applies the stages of a preparation, and stores kept and dropped documents as Parquet.

1. Inputs are cut into chunks (`ingest/tasks.py`: splits); each is a task. Equal inputs and settings give equal chunks.
2. The first pass reads the chunks and applies the stages before the first comparison of documents (`passes.py`).
3. Hashes of all chunks are compared, a range at a time (`duplicates.py`); the next pass drops or cuts what was found.
4. The statistics are written last. An output without statistics is not complete.

Every task is a pure function of its input and stores a receipt at its end. So any number of workers writes the same
bytes, and an interrupted preparation repeats only tasks without a receipt.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from data_service.corpus.manifest import StoredFile
from data_service.errors import InputError, PrepareError
from data_service.ingest.configuration import FILE_VERSIONS_ENTRY, SPLIT_HASHES_ENTRY, name_changed_files
from data_service.ingest.file_kinds import PREPARATION_KEY, PREPARED_DOCUMENTS_PREFIX, STATISTICS_KEY
from data_service.ingest.inputs import InputListing
from data_service.ingest.pool import (
    Progress,
    ReportProgress,
    StageRunner,
    WorkerPool,
    remove_build_files,
    remove_foreign_objects,
)
from data_service.ingest.streamed import PieceReader
from data_service.ingest.tasks import InputSplit, hash_strings, plan_splits, streamed_files
from data_service.prepare.comparing import PrepareRunner, compare_ids, compare_texts
from data_service.prepare.configuration import (
    Preparation,
    ReadOptions,
    check_same_configuration,
    claim_output,
    describe_identity,
    list_input_files,
    short_hash,
)
from data_service.prepare.contamination import indexed_splits
from data_service.prepare.frequent_paragraphs import encode_paragraph_table
from data_service.prepare.layout import DROPPED_PREFIX, PARAGRAPHS_PREFIX, PrepareLayout
from data_service.prepare.paragraphs import ParagraphCuts
from data_service.prepare.passes import (
    READ_STAGE,
    ContentReceipt,
    HashContentTask,
    LaterPassTask,
    PassReceipt,
    PreparePass,
    ReadTask,
    hash_chunk,
    read_chunk,
    read_documents,
    run_later_pass,
)
from data_service.prepare.stages import ComparingStage, DocumentStage, NearDuplicates, open_filter, stage_labels
from data_service.prepare.statistics import Statistics, gather_statistics, save_statistics
from data_service.store.base import Store, digest
from data_service.store.open import open_store

AnyReadTask = TypeVar("AnyReadTask", bound=ReadTask)


def prepare(preparation: Preparation, output: str, workers: int, progress: ReportProgress) -> Statistics:
    """Prepare documents and return the statistics. Continues an interrupted preparation; reuses a complete output.

    Args:
        output: folder or s3:// prefix for the output alone. All workers must be able to reach it.
        workers: number of workers: 0 or 1 for this process alone, more for Ray. It never changes the output.
        progress: function that is called in this process as tasks finish.

    Raises:
        InputError: inputs are missing or invalid, or two documents have the same id. The message names the file and the
            position in it.
        PrepareError: a stage lacks a file or a package, the output was prepared with other settings or documents, or no
            document is left.
        StoreError: a store cannot be used.
    """
    for stage in preparation.stages:
        if not isinstance(stage, ComparingStage):
            open_filter(stage)  # fails before any work if a file or package is missing
    store = open_store(output)
    listings = list_input_files(preparation, store)
    wanted = describe_identity(preparation, listings)
    if store.size(STATISTICS_KEY) is not None:
        statistics = load_statistics(store)
        check_same_configuration(store, statistics.preparation, wanted, "documents")
        if statistics.preparation.get(FILE_VERSIONS_ENTRY) != wanted[FILE_VERSIONS_ENTRY]:
            with _open_passes(preparation, listings, wanted, store, workers, progress) as passes:
                _check_documents_unchanged(passes, statistics, store, progress)
        size = sum(part.size for part in statistics.parts.values())
        progress(Progress("already built", len(statistics.parts), len(statistics.parts), size, size))
    else:
        claim_output(store, wanted)
        try:
            with _open_passes(preparation, listings, wanted, store, workers, progress) as passes:
                statistics = passes.run(wanted)
        except (InputError, PrepareError):
            # Without this file the output accepts corrected settings. The tasks' receipts stay, to continue from them.
            store.delete(PREPARATION_KEY)
            raise
        remove_foreign_objects(store, (PREPARED_DOCUMENTS_PREFIX, DROPPED_PREFIX, PARAGRAPHS_PREFIX), statistics.parts)
        save_statistics(store, STATISTICS_KEY, statistics)
    remove_build_files(store, progress)
    return statistics


def load_statistics(store: Store) -> Statistics:
    """Return the statistics of a complete preparation.

    Raises:
        KeyMissing: the store holds no statistics.
        PrepareError: the statistics are damaged, or of a newer version.
    """
    try:
        return Statistics.model_validate_json(store.get(STATISTICS_KEY))
    except ValueError as error:
        raise PrepareError(
            f"{store.uri}/{STATISTICS_KEY} does not hold the statistics of prepared documents: {error}",
            remedy="give another OUT folder, or delete the files in this folder",
        ) from error


@contextmanager
def _open_passes(
    preparation: Preparation,
    listings: Sequence[InputListing],
    configuration: dict[str, object],
    store: Store,
    workers: int,
    progress: ReportProgress,
) -> "Iterator[_Passes]":
    """Yield the passes of a preparation. Their workers are stopped at the end of the block."""
    options = [entry.read_options(preparation.chunk_bytes) for entry in preparation.inputs]
    streams = any(streamed_files(each.files, one) for each, one in zip(listings, options, strict=True))
    with WorkerPool(workers, preparation.chunk_bytes if streams else 0) as pool:
        layout = PrepareLayout(store.uri, short_hash(configuration))
        yield _Passes(preparation, listings, options, StageRunner(layout, pool, progress))


def _check_documents_unchanged(
    passes: "_Passes", statistics: Statistics, store: Store, progress: ReportProgress
) -> None:
    """Read the inputs again, because the versions of their files differ from those of the complete output.

    Raises:
        InputError: the inputs are not valid any more.
        PrepareError: documents have changed.
    """
    try:
        splits, now = passes.hash_chunks()
        changed = name_changed_files(splits, now, statistics.preparation.get(SPLIT_HASHES_ENTRY))
        if changed:
            raise PrepareError(
                f"the inputs of {store.uri} have changed since they were prepared: {changed}",
                remedy="give another OUT folder, or delete the files in this folder",
            )
    except (InputError, PrepareError):
        remove_build_files(store, progress)
        raise


class _Passes:
    """The passes of a preparation over its chunks."""

    def __init__(
        self,
        preparation: Preparation,
        listings: Sequence[InputListing],
        options: Sequence[ReadOptions],
        runner: PrepareRunner,
    ) -> None:
        self._preparation, self._listings, self._options = preparation, listings, options
        self._runner = runner
        self._passes = plan_passes(preparation)
        self._named = ""  # digest of the near-duplicate clusters recorded in documents (`keep: all`)

    def run(self, configuration: dict[str, object]) -> Statistics:
        """Run all passes; return the statistics.

        Raises:
            InputError, PrepareError, StoreError: as `prepare`.
        """
        tasks = self._plan_tasks(ReadTask)
        receipts = [self._runner.run_stage("reading", tasks, read_chunk, receipt=PassReceipt)]
        self._refuse_equal_ids(tasks, receipts[0])
        tables: dict[str, StoredFile] = {}
        for number, of_pass in enumerate(self._passes[1:], start=1):
            later = self._plan_next_pass(of_pass, receipts[number - 1])
            receipts.append(self._runner.run_stage("filtering", later, run_later_pass, receipt=PassReceipt))
            if isinstance(later[0].found, ParagraphCuts):
                tables |= self._store_paragraph_table(number, receipts[number])
        labels = [READ_STAGE, *stage_labels(self._preparation.stages)]
        sources = [task.entry.source for task in tasks]
        searched = indexed_splits(self._preparation.stages)
        content = {SPLIT_HASHES_ENTRY: [receipt.content for receipt in receipts[0]]}
        statistics = gather_statistics(configuration | content, labels, sources, receipts, searched, tables)
        if not statistics.documents_kept:
            raise _nothing_kept_error(statistics)
        return statistics

    def _store_paragraph_table(self, number: int, receipts: list[PassReceipt]) -> dict[str, StoredFile]:
        """Store the table of the most frequent cut paragraphs; return its key with size and digest."""
        data = encode_paragraph_table([each for receipt in receipts for each in receipt.listed])
        key = self._runner.layout.listed_paragraphs_key(number)
        self._runner.layout.open_output().put(key, data)
        return {key: StoredFile(len(data), digest(data))}

    def hash_chunks(self) -> tuple[list[InputSplit], list[str]]:
        """Return the chunks, and a hash of the documents in each. Raises InputError, StoreError: as `prepare`."""
        tasks = self._plan_tasks(HashContentTask)
        hashed = self._runner.run_stage("reading", tasks, hash_chunk, receipt=ContentReceipt)
        return [task.split for task in tasks], [receipt.content for receipt in hashed]

    def _plan_tasks(self, kind: type[AnyReadTask]) -> list[AnyReadTask]:
        """Return a task of class `kind` for each chunk. Measures large compressed files first."""
        packed = [
            file
            for listing, options in zip(self._listings, self._options, strict=True)
            for file in streamed_files(listing.files, options)
        ]
        sizes, self._runner = self._runner.measure_streamed_files(packed)
        chunks = [
            (split, options, entry)
            for entry, listing, options in zip(self._preparation.inputs, self._listings, self._options, strict=True)
            for split in plan_splits(listing.files, options, sizes)
        ]
        return [
            kind(self._runner.layout, index, split.source, split, options, entry, self._passes[0])
            for index, (split, options, entry) in enumerate(chunks)
        ]

    def _plan_next_pass(self, next_pass: PreparePass, previous_receipts: list[PassReceipt]) -> list[LaterPassTask]:
        """Compare the documents that the previous pass kept; return the tasks of `next_pass`."""
        earlier = self._passes[next_pass.number - 1]
        assert earlier.comparing is not None, "a later pass follows a comparison"
        found = compare_texts(self._runner, earlier.comparing, earlier.number, previous_receipts)
        if isinstance(earlier.comparing, NearDuplicates) and earlier.comparing.keep == "all":
            self._named = found[0].digest[:32]
        return [
            LaterPassTask(
                self._runner.layout,
                index,
                hash_strings([receipt.digest, found[index].digest]),
                next_pass,
                compared=earlier.compared or "",
                comparing=earlier.comparing,
                size=receipt.files.get(self._runner.layout.between_passes_key(index, next_pass.number - 1), 0),
                found=found[index],
                named=self._named,
            )
            for index, receipt in enumerate(previous_receipts)
        ]

    def _refuse_equal_ids(self, tasks: list[ReadTask], read: list[PassReceipt]) -> None:
        """Raise InputError if two documents have the same id."""
        compared = compare_ids(self._runner, read)
        equal = sum(receipt.copies for receipt in compared)
        first = min((receipt.first_copy for receipt in compared if receipt.first_copy), default=None)
        if first is None:
            return
        (name, place), (_, other) = (_find_document(tasks[chunk], ordinal) for chunk, ordinal in first)
        raise InputError(
            f"{equal:,} documents have the id of an earlier document; the first is {name!r}: at {other} and at {place}",
            remedy="set `id` in `fields` to a field of unique values, or leave `id` out of `fields`: then ids have "
            "source, file and position (give files with equal names different sources)",
        )


def plan_passes(preparation: Preparation) -> list[PreparePass]:
    """Return the passes: one before each stage that compares documents, and a last one."""
    passes: list[PreparePass] = []
    stages: list[tuple[str, DocumentStage]] = []
    for label, stage in zip(stage_labels(preparation.stages), preparation.stages, strict=True):
        if isinstance(stage, ComparingStage):
            passes.append(PreparePass(len(passes), tuple(stages), label, stage))
            stages = []
        else:
            stages.append((label, stage))
    return [*passes, PreparePass(len(passes), tuple(stages), None, None)]


def _find_document(task: ReadTask, ordinal: int) -> tuple[str, str]:
    """Return the id of document `ordinal` of a chunk, and its place in the input as text."""
    if task.split.streamed_piece:
        task = task.with_piece(PieceReader().read(task.split.streamed_piece, task.options))
    place, found = next(islice(read_documents(task), ordinal, None))
    return found.id, str(place)


def _nothing_kept_error(statistics: Statistics) -> PrepareError:
    lines = [
        f"  {stage.stage} dropped {sum(stage.dropped.values()):,} of {stage.entered:,}: "
        + ", ".join(f"{reason} {count:,}" for reason, count in stage.dropped.items())
        for stage in statistics.stages
        if stage.dropped
    ]
    return PrepareError(
        "\n".join([f"none of the {statistics.documents_read:,} documents was kept:", *lines]),
        remedy="relax the stage that drops most; the folder dropped/ of the output lists each document with its reason",
    )
