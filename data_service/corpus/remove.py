"""Removes documents from a corpus: finds them by id or by number, and adds a removal to the list (`removals.py`).

Also finds the documents of a merged corpus that were removed from its parts.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from data_service.corpus.corpus import SPLITS, Corpus, SplitName, open_corpus, open_part
from data_service.corpus.manifest import BlockTable
from data_service.corpus.parts import key_of_part_object
from data_service.corpus.reader import read_block
from data_service.corpus.removals import (
    REMOVALS_FOLDER,
    DocumentsBySplit,
    Removal,
    RemovalChain,
    RemovedDocuments,
    append_removal,
    load_removals,
    removal_key,
)
from data_service.corpus.sidecar import find_ids
from data_service.errors import CorpusError
from data_service.store.base import parallel_map

ReportDone = Callable[[int, int], None]
"""Progress callback, called as (newly read, total): numbers of shards or of blocks."""

_MAX_LISTED_DOCUMENTS = 20  # largest number of unknown documents that an error lists
_DOCUMENT_NUMBER = re.compile(r"(?:(train|heldout):)?([0-9]{1,18})")  # such as 17, train:17 or heldout:3
_DocumentRow = tuple[int, int, int, int]  # document, block, start, stop; see `RemovedDocuments`


@dataclass(frozen=True)
class RemovalReport:
    """The result of `remove_documents`.

    Attributes:
        number: number of the new removal, from 1; None if all documents were already removed.
        documents: documents of the new removal.
        already: documents that earlier removals list.
    """

    number: int | None
    documents: DocumentsBySplit
    already: DocumentsBySplit


def documents_by_id(
    corpus: Corpus, ids: Iterable[str], report: ReportDone = lambda done, total: None
) -> DocumentsBySplit:
    """Return the documents with these ids. A document of which stretches are held out lies in both splits.

    Raises:
        CorpusError: the corpus was built without provenance or ids, or no document has one of these ids.
        StoreError: the store cannot be read.
    """
    wanted = set(ids)
    rows: dict[SplitName, list[_DocumentRow]] = {part: [] for part in SPLITS}
    missing = set(wanted)
    for found in find_ids(corpus, wanted, report):
        at = found.origin
        rows[found.split].append((found.number, at.block, at.start, at.start + at.tokens))
        missing.discard(at.provenance.id or "")
    if missing:
        raise _unknown_documents_error(corpus, "no document with the id", sorted(missing))
    return _documents_from_rows(rows)


def documents_by_number(
    corpus: Corpus, names: Iterable[str], report: ReportDone = lambda done, total: None
) -> DocumentsBySplit:
    """Return the documents with these numbers, written as `17`, `train:17` or `heldout:3`.

    Raises:
        CorpusError: a name is not such a number, or the corpus has no such document.
        CorruptBlock, StoreError: a block cannot be read.
    """
    wanted: dict[SplitName, set[int]] = {part: set() for part in SPLITS}
    unknown = []
    for name in names:
        found = _DOCUMENT_NUMBER.fullmatch(name)
        split: SplitName = "heldout" if found and found[1] == "heldout" else "train"
        if found is None or int(found[2]) >= int(corpus.table(split).documents.sum()):
            unknown.append(name)
        else:
            wanted[split].add(int(found[2]))
    if unknown:
        raise _unknown_documents_error(corpus, "no document with the number", unknown)
    blocks = [one for part in SPLITS if wanted[part] for one in _group_by_block(corpus, part, wanted[part])]
    rows: dict[SplitName, list[_DocumentRow]] = {part: [] for part in SPLITS}
    for one, placed in zip(blocks, parallel_map(partial(_locate_documents, corpus), blocks), strict=True):
        rows[one.split] += placed
        report(1, len(blocks))
    return _documents_from_rows(rows)


def carried_removals(sources: Sequence[Corpus]) -> Iterator[Removal]:
    """Yield the removals of all sources, with document and block numbers as in the corpus merged from them."""
    documents, blocks = Counter[str](), Counter[str]()
    for source in sources:
        for removal in load_removals(source.store, source.manifest).removals:
            train = removal.train.moved_by(documents["train"], blocks["train"])
            heldout = removal.heldout.moved_by(documents["heldout"], blocks["heldout"])
            yield Removal(train, heldout, removal.by, removal.at, removal.reason)
        for split in SPLITS:
            documents[split] += int(source.table(split).documents.sum())
            blocks[split] += len(source.table(split))


def chain_begins_with(chain: RemovalChain, carried: Sequence[Removal]) -> bool:
    """Return whether the first removals of a chain equal `carried` in documents, author, time and reason."""
    return list(map(_comparable_fields, chain.removals[: len(carried)])) == list(map(_comparable_fields, carried))


def _comparable_fields(removal: Removal) -> tuple[object, ...]:
    documents = (removal.train.documents.tolist(), removal.heldout.documents.tolist())
    return removal.by, removal.at, removal.reason, documents


def find_removed_in_parts(corpus: Corpus) -> DocumentsBySplit:
    """Return the documents of a merged corpus that were removed, before or after the merge, from its parts or from the
    merged corpora that it was made from.

    Raises:
        CorpusError: a part is gone, is another corpus than was merged, or its list of removals is damaged.
        StoreError: a store cannot be read.
    """
    rows: dict[SplitName, set[_DocumentRow]] = {part: set() for part in SPLITS}
    numbers = range(len(corpus.manifest.parts))
    parts = [(open_part(corpus, number), numbers[number : number + 1]) for number in numbers]
    for source, its_parts in [*parts, *_merged_sources(corpus, numbers)]:
        chain = load_removals(source.store, source.manifest)
        for split in SPLITS:
            block, document = _first_block_and_document(corpus.table(split), its_parts)
            gone = chain.removed_documents(split).moved_by(document, block)
            rows[split].update(zip(*(column.tolist() for column in vars(gone).values()), strict=True))
    return _documents_from_rows(rows)


def _merged_sources(corpus: Corpus, numbers: range) -> Iterator[tuple[Corpus, range]]:
    """Yield the merged corpora from which a corpus was merged, recursively, each with the numbers of its parts in the
    outermost corpus. `numbers`: numbers, in the outermost corpus, of the parts of `corpus`. A merged corpus that is
    missing or has other parts now is skipped: training reads only parts."""
    parts, first = corpus.manifest.parts, 0
    merged = corpus.manifest.options.get("merged")
    for uri in merged if isinstance(merged, list) else []:
        try:
            source = open_corpus(str(uri))
        except CorpusError:
            continue
        its = source.manifest.parts
        starts = range(first, len(parts) - len(its) + 1) if its else ()
        found = next((start for start in starts if parts[start : start + len(its)] == its), None)
        if found is not None:
            first = found + len(its)
            its_numbers = numbers[found:first]
            yield source, its_numbers
            yield from _merged_sources(source, its_numbers)


def find_unapplied_removals(corpus: Corpus) -> DocumentsBySplit:
    """Return the documents that were removed from parts of a merged corpus, but not from the merged corpus. Raises as
    `find_removed_in_parts`."""
    chain = load_removals(corpus.store, corpus.manifest)
    return split_by_removed(find_removed_in_parts(corpus), chain)[0]


def _first_block_and_document(table: BlockTable, parts: Iterable[int]) -> tuple[int, int]:
    """Return the numbers in the split of the first block and the first document that come from one of `parts`."""
    prefixes = tuple(key_of_part_object(number, "") for number in parts)
    of_part = np.array([key.startswith(prefixes) for key in table.shards], dtype=np.bool_)
    found = np.flatnonzero(of_part[table.shard]) if len(table.shards) else np.zeros(0, dtype=np.int64)
    block = int(found[0]) if len(found) else len(table)
    return block, int(table.documents[:block].sum())


def remove_documents(
    corpus: Corpus, documents: DocumentsBySplit, *, removed_by: str, removed_at: int, reason: str
) -> RemovalReport:
    """Add a removal that lists the documents not yet removed. If all are removed already, nothing is written.

    Concurrent calls are safe: each document ends up in exactly one removal.

    Args:
        corpus: the corpus.
        documents: at least one document of the corpus.
        removed_by: user and host.
        removed_at: seconds since 1970.
        reason: why the documents are removed; not empty.

    Raises:
        CorpusError: the reason is empty, or the list of removals is damaged.
        StoreError: the store cannot be read or written.
    """
    if not reason.strip():
        raise CorpusError("a removal has no reason", remedy="say why the documents are removed: --reason TEXT")
    while True:
        chain = load_removals(corpus.store, corpus.manifest)
        new, already = split_by_removed(documents, chain)
        if not len(new):
            return RemovalReport(None, new, already)
        removal = Removal(new.train, new.heldout, removed_by, removed_at, reason.strip())
        longer = append_removal(corpus.store, corpus.manifest, chain, removal)
        if longer is not None:
            number = len(longer.removals)
            # Killed commands may have left temporary files in the folder.
            corpus.store.remove_leftovers(REMOVALS_FOLDER.rstrip("/"), older_than_key=removal_key(number))
            return RemovalReport(number, new, already)


def split_by_removed(documents: DocumentsBySplit, chain: RemovalChain) -> tuple[DocumentsBySplit, DocumentsBySplit]:
    """Return (kept, removed): `documents`, divided by whether a removal of `chain` lists them."""
    kept, removed = {}, {}
    for split in SPLITS:
        given: RemovedDocuments = getattr(documents, split)
        gone = np.isin(given.documents, chain.removed_documents(split).documents)
        kept[split], removed[split] = given.filter_documents(~gone), given.filter_documents(gone)
    return DocumentsBySplit(**kept), DocumentsBySplit(**removed)


def _documents_from_rows(rows: Mapping[SplitName, Collection[_DocumentRow]]) -> DocumentsBySplit:
    return DocumentsBySplit(RemovedDocuments.from_rows(rows["train"]), RemovedDocuments.from_rows(rows["heldout"]))


@dataclass(frozen=True)
class _BlockDocuments:
    """Some documents of one block. `numbers`: numbers in the split; `first`: that of the block's first document."""

    split: SplitName
    block: int
    first: int
    numbers: list[int]


def _group_by_block(corpus: Corpus, split: SplitName, document_numbers: set[int]) -> Iterator[_BlockDocuments]:
    """Yield the given documents of a split, grouped by block."""
    documents = corpus.table(split).documents
    ends, numbers = np.cumsum(documents), np.array(sorted(document_numbers), dtype=np.int64)
    blocks, starts = np.unique(np.searchsorted(ends, numbers, side="right"), return_index=True)
    for block, there in zip(blocks.tolist(), np.split(numbers, starts[1:]), strict=True):
        yield _BlockDocuments(split, block, int(ends[block] - documents[block]), there.tolist())


def _locate_documents(corpus: Corpus, wanted: _BlockDocuments) -> list[_DocumentRow]:
    """Return (number, block, start, stop) of each of the documents."""
    block = read_block(corpus.store, corpus.table(wanted.split), wanted.block)
    edges = block.sentences[block.documents]
    places = [(number, number - wanted.first) for number in wanted.numbers]
    return [(number, wanted.block, int(edges[at]), int(edges[at + 1])) for number, at in places]


def _unknown_documents_error(corpus: Corpus, what: str, names: Sequence[str]) -> CorpusError:
    more = f" and {len(names) - _MAX_LISTED_DOCUMENTS:,} more" if len(names) > _MAX_LISTED_DOCUMENTS else ""
    return CorpusError(
        f"{corpus.store.uri}: {what} {', '.join(map(repr, names[:_MAX_LISTED_DOCUMENTS]))}{more}",
        remedy="look documents up with `maskfleet corpus find` or `maskfleet corpus show`; nothing was removed",
    )
