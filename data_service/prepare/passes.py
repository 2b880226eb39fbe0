"""The passes over the documents. A pass applies stages to every chunk, up to the next stage that compares documents.

The first pass reads the inputs. Later passes read the documents that the previous pass kept, and first drop or cut what
the comparison found. The task of a chunk writes one file of kept and one of dropped documents, and its receipt last.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import ClassVar, assert_never

from pydantic import Field

from data_service.ingest.documents import read_records
from data_service.ingest.encodings import is_garbled
from data_service.ingest.places import RecordPlace
from data_service.ingest.records import BadRecord, TextRecord
from data_service.ingest.scan import collapse_spaces
from data_service.ingest.tasks import BuildTask, SplitTask, TaskReceipt, hash_strings
from data_service.prepare.configuration import InputSource
from data_service.prepare.counts import PassCounts, count_length
from data_service.prepare.documents import (
    DROPPED_SCHEMA,
    CutDecision,
    Document,
    DropDecision,
    DroppedDocument,
    RowsWriter,
    encode_content,
    kept_schema,
    read_part_documents,
)
from data_service.prepare.duplicates import ChunkClusters, HashCollector
from data_service.prepare.layout import PrepareLayout, StoredRecords
from data_service.prepare.minhash import choose_bands
from data_service.prepare.paragraphs import DuplicateParagraphs, ListedParagraph, ParagraphCuts, ParagraphHashCollector
from data_service.prepare.signatures import ChunkSignatures, SignatureCollector
from data_service.prepare.stages import ComparingStage, DocumentStage, ExactDuplicates, NearDuplicates, open_filter
from data_service.store.base import Store

READ_STAGE = "read"  # label of the reading of inputs, as if it were a stage
IDS_KIND = "ids"  # kind of the hashes of ids, as in `PrepareLayout.hashes_of_kind_key`


def text_hashes_kind(number: int) -> str:
    """Return the kind (a part of keys) of the hashes of texts that pass `number` stores for the comparison after it."""
    return f"texts-{number}"


@dataclass(frozen=True)
class PreparePass:
    """A pass: stages for single documents, and the following stage that compares documents.

    Attributes:
        number: number of the pass, from 0.
        stages: (label, settings) of the stages for single documents.
        compared, comparing: label and settings of the comparing stage after the pass; None for the last pass.
    """

    number: int
    stages: tuple[tuple[str, DocumentStage], ...]
    compared: str | None
    comparing: ComparingStage | None


class PassReceipt(TaskReceipt):
    """The result of a pass over a chunk.

    Attributes:
        counts: counts of documents kept, changed and dropped.
        digest: hash of all objects that the task wrote.
        content: hash of the documents that the first pass read; "" for later passes.
        parts: digests of the written files that belong to the output, by key.
        ids: stored hashes of the ids of all documents read; None for later passes.
        texts: stored hashes or signatures of texts, or hashes of paragraphs, to be compared after the pass.
        listed: rows of the table of frequent paragraphs for those whose first chunk this is.
    """

    counts: PassCounts
    digest: str
    content: str = ""
    parts: dict[str, str]
    ids: StoredRecords | None = None
    texts: ChunkSignatures | StoredRecords | None = None
    listed: list[ListedParagraph] = Field(default_factory=list)


@dataclass(frozen=True)
class ReadTask(SplitTask):
    """The task of reading a chunk of an input and applying the first pass to its documents."""

    layout: PrepareLayout
    entry: InputSource
    run: PreparePass

    stage: ClassVar[str] = "pass-0"


@dataclass(frozen=True)
class LaterPassTask(BuildTask):
    """The task of applying a later pass to a chunk's documents.

    Attributes:
        run: the pass.
        compared, comparing: label and settings of the comparing stage before the pass.
        size: bytes of the documents that the previous pass kept.
        found: result of the comparison: copies, or paragraphs to cut.
        named: digest of the near-duplicate clusters recorded in the documents; "" without such clusters.
    """

    layout: PrepareLayout
    run: PreparePass
    compared: str
    comparing: ComparingStage
    size: int
    found: ChunkClusters | ParagraphCuts
    named: str

    @property
    def receipt_key(self) -> str:
        return self.layout.receipt_key(f"pass-{self.run.number}", self.index)

    @property
    def input_bytes(self) -> int:
        return self.size


def read_chunk(task: ReadTask, store: Store) -> PassReceipt:
    """Read a chunk and apply the first pass to its documents; return the receipt.

    Raises:
        InputError, StoreError: as `read_records`.
        PrepareError: a stage lacks a file or a package.
    """
    sink = _PassOutput(task.layout, task.index, task.run)
    ids, content = HashCollector(), blake2b(digest_size=16)
    for _, found in read_documents(task):
        content.update(encode_content(found))
        sink.counts.entered += 1
        ids.add(found.id, found.id)
        if isinstance(found, DroppedDocument):
            sink.record_dropped(found)
        else:
            sink.counts.entered_bytes += len(found.text.encode())
            sink.counts.odd += is_garbled(found.text)
            count_length(sink.counts.lengths_read, found.text)
            sink.apply_filters(found)
    hashed = ids.store(store, task.layout.hashes_of_kind_key(IDS_KIND, task.index))
    return sink.finish(store, task, hashed).model_copy(update={"content": content.hexdigest()})


class HashContentTask(ReadTask):
    """The task of reading a chunk of an input again, to check whether it has changed since the output was made."""

    stage: ClassVar[str] = "content"


class ContentReceipt(TaskReceipt):
    """The receipt of a HashContentTask. `content`: hash of the chunk's documents, as in `PassReceipt`."""

    content: str


def hash_chunk(task: HashContentTask, store: Store) -> ContentReceipt:
    """Read a chunk and hash its documents; return the receipt. Writes no documents.

    Raises:
        InputError, StoreError: as `read_records`.
    """
    content = blake2b(digest_size=16)
    for _, found in read_documents(task):
        content.update(encode_content(found))
    return ContentReceipt(source=task.source, content=content.hexdigest())


def read_documents(task: ReadTask) -> Iterator[tuple[RecordPlace, Document | DroppedDocument]]:
    """Yield (place in the input, document) for a chunk; empty and unreadable documents as DroppedDocument."""
    named = task.options.metadata_fields or ()
    numbers: dict[str, int] = {name: named.index(field) for name, field in task.entry.fields.items()}
    for record in read_records(task.split, task.options):
        place = record.place
        assert place is not None, "read with metadata_fields"
        if isinstance(record, BadRecord):
            name = _fallback_id(place, task.entry)
            yield place, DroppedDocument(name, task.entry.source, READ_STAGE, "bad_record", record.reason)
            continue
        found = _to_document(record, place, task.entry, numbers)
        if record.is_blank:
            yield place, DroppedDocument(found.id, found.source, READ_STAGE, record.absent or "empty")
        else:
            yield place, found


def _to_document(record: TextRecord, place: RecordPlace, entry: InputSource, numbers: dict[str, int]) -> Document:
    """Return the document of a record. `numbers`: for each field name, the index of its value in the metadata."""
    stated = {name: value for name, number in numbers.items() if (value := record.metadata[number])}
    known = {str(name): value for name, value in entry.constants.items()} | stated
    return Document(
        known.get("id") or _fallback_id(place, entry),
        record.text,
        entry.source,
        url=known.get("url"),
        licence=known.get("licence"),
        language=known.get("language"),
        date=known.get("date"),
    )


def _fallback_id(place: RecordPlace, entry: InputSource) -> str:
    """Return an id for a document without its own: the source, the file and the position in the file."""
    name = f"{entry.source}/{place.file.key}"
    return f"{name}:{place.unit}-{place.number}" if place.unit else name


def run_later_pass(task: LaterPassTask, store: Store) -> PassReceipt:
    """Apply a later pass to a chunk's documents; return the receipt.

    Raises:
        StoreError: the store cannot be used.
        PrepareError: a stage lacks a file or a package.
    """
    sink = _PassOutput(task.layout, task.index, task.run, task.named)
    if isinstance(task.found, ParagraphCuts):
        listed = _cut_paragraphs(store, task, task.found, sink)
    else:
        listed = []
        _drop_copies(store, task, task.found, sink)
    return sink.finish(store, task, None, listed)


def _cut_paragraphs(
    store: Store, task: LaterPassTask, cuts: ParagraphCuts, sink: "_PassOutput"
) -> list[ListedParagraph]:
    """Cut frequent paragraphs from the documents and filter these; return rows of the table of paragraphs."""
    cutter, label = cuts.open_cutter(store), task.compared
    for found in sink.count_entering(_read_intermediate_documents(store, task)):
        text, paragraphs, characters = cutter.cut_paragraphs(found.text)
        if not paragraphs:
            sink.apply_filters(found)
            continue
        sink.counts.paragraphs_cut[label] += paragraphs
        sink.counts.characters_cut[label] += characters
        if cutter.is_too_short(text):
            detail = f"{paragraphs} of {cuts.stage.unit}s cut, {len(text.split())} words left"
            sink.record_dropped(DroppedDocument(found.id, found.source, label, "little_left", detail))
        else:
            sink.counts.changed[label] += 1
            sink.apply_filters(replace(found, text=text))
    return cutter.listed


def _drop_copies(store: Store, task: LaterPassTask, clusters: ChunkClusters, sink: "_PassOutput") -> None:
    """Drop documents that are copies, or record their clusters (`keep: all`); filter the kept documents."""
    copies, weights = clusters.read_clusters(store)
    for ordinal, found in enumerate(sink.count_entering(_read_intermediate_documents(store, task))):
        first = copies.get(ordinal)
        if isinstance(task.comparing, NearDuplicates) and task.comparing.keep == "all":
            if first or ordinal in weights:
                sink.counts.clustered[task.compared] += 1
                found = replace(found, cluster=first or found.id)
            sink.apply_filters(found)
        elif first is not None:
            reason = "near_copy" if isinstance(task.comparing, NearDuplicates) else "copy"
            detail = f"{reason.replace('_', ' ')} of {first}"
            sink.record_dropped(DroppedDocument(found.id, found.source, task.compared, reason, detail))
        else:
            sink.apply_filters(replace(found, cluster_size=weights.get(ordinal, found.cluster_size)))


def _read_intermediate_documents(store: Store, task: LaterPassTask) -> Iterator[Document]:
    """Yield the documents of the task's chunk that the previous pass kept."""
    return (
        read_part_documents(store.get(task.layout.between_passes_key(task.index, task.run.number - 1)))
        if task.size
        else iter(())
    )


class _PassOutput:
    """Applies the stages of a pass to a chunk's documents, and writes the kept and dropped documents."""

    def __init__(self, layout: PrepareLayout, index: int, run: PreparePass, clusters: str = "") -> None:
        self.counts = PassCounts()
        self._layout, self._index, self._run = layout, index, run
        self._filters = [(label, open_filter(stage)) for label, stage in run.stages]
        self._kept, self._dropped = RowsWriter(kept_schema(clusters)), RowsWriter(DROPPED_SCHEMA)
        self._texts = _make_text_collector(run.comparing)

    def count_entering(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents, counting them as entered."""
        for document in documents:
            self.counts.entered += 1
            self.counts.entered_bytes += len(document.text.encode())
            yield document

    def apply_filters(self, document: Document) -> None:
        """Apply the stages to a document; add it to the kept or dropped documents."""
        for label, decide in self._filters:
            decided = decide(document)
            if isinstance(decided, DropDecision):
                self.record_dropped(
                    DroppedDocument(document.id, document.source, label, decided.reason, decided.detail)
                )
                return
            if isinstance(decided, CutDecision):
                self.counts.cut[label][decided.reason] += 1
                decided = decided.document
            if decided.text is not document.text and decided.text != document.text:
                self.counts.changed[label] += 1
            document = decided
        self.counts.left += 1
        self.counts.left_bytes += len(document.text.encode())
        self._kept.add(document)
        if isinstance(self._texts, HashCollector):
            self._texts.add(collapse_spaces(document.text), document.id, document.cluster_size)
        elif isinstance(self._texts, ParagraphHashCollector):
            self._texts.add(document.text)
        elif self._texts is not None:
            self._texts.add(document.text, document.id, document.cluster_size)
        else:
            self.counts.languages[document.language or ""] += 1
            self.counts.licences[document.licence or ""] += 1
            count_length(self.counts.lengths_left, document.text)

    def record_dropped(self, dropped: DroppedDocument) -> None:
        self.counts.dropped[dropped.stage][dropped.reason] += 1
        self._dropped.add(dropped)

    def finish(
        self,
        store: Store,
        task: "ReadTask | LaterPassTask",
        ids: StoredRecords | None,
        listed: Sequence[ListedParagraph] = (),
    ) -> PassReceipt:
        """Store the kept and dropped documents, and the hashes of texts; return the receipt."""
        last, number = self._run.compared is None, self._run.number
        key = self._layout.kept_key(self._index) if last else self._layout.between_passes_key(self._index, number)
        dropped_key = self._layout.dropped_key(self._index, number)
        kept, dropped = self._kept.store(store, key), self._dropped.store(store, dropped_key)
        texts: StoredRecords | None = None
        if self._texts is not None:
            texts = self._texts.store(store, self._layout.hashes_of_kind_key(text_hashes_kind(number), self._index))
        parts = dict.fromkeys(dropped, self._dropped.digest)
        if last:
            parts |= dict.fromkeys(kept, self._kept.digest)
        hashed = [found for found in (ids, texts) if found is not None]
        return PassReceipt(
            source=task.source,
            files=kept | dropped | {name: size for found in hashed for name, size in found.object_sizes().items()},
            counts=self.counts,
            digest=hash_strings([self._kept.digest, self._dropped.digest, *(found.digest for found in hashed)]),
            parts=parts,
            ids=ids,
            texts=texts,
            listed=list(listed),
        )


def _make_text_collector(
    comparing: ComparingStage | None,
) -> HashCollector | SignatureCollector | ParagraphHashCollector | None:
    """Return the collector of the hashes that a comparing stage needs; None without such a stage."""
    match comparing:
        case None:
            return None
        case ExactDuplicates():
            return HashCollector()
        case NearDuplicates():
            return SignatureCollector(comparing.words, choose_bands(comparing.similarity))
        case DuplicateParagraphs():
            return ParagraphHashCollector(comparing)
        case other:
            assert_never(other)
