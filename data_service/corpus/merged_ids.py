"""Checks that no two corpora to be merged have documents with the same id.

A copy that the merge removes may have the id of its original. Hashes of ids are sorted in temporary files, one range
of hashes at a time, so memory does not grow with the corpora.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.corpus import SPLITS, Corpus, SplitName, locate_document_in_block
from data_service.corpus.removals import DocumentsBySplit
from data_service.corpus.sidecar import RowConditions, read_document_ids, read_origins
from data_service.errors import CorpusError
from data_service.processes import temporary_folder
from data_service.store.base import parallel_map

_HASH_RANGES = 256  # number of files of id hashes: one for each first byte of a hash
_LISTED_IDS = 10  # largest number of ids that an error message lists
# A document: the hash of its id as two words, number of its corpus, whether it is held out, and number in its split.
_ID_RECORD_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8"), ("part", "<u4"), ("heldout", "<u4"), ("document", "<i8")])
_Location = tuple[int, SplitName, int]  # a document: number of its corpus, split, number in that split


class DuplicateIdError(CorpusError):
    """Documents of two corpora have the same id."""


def check_unique_ids(sources: Sequence[Corpus], copies: DocumentsBySplit, report: Callable[[int], None]) -> None:
    """Check that no two corpora have documents with the same id. Corpora without provenance have no ids.

    Args:
        sources: corpora that are merged, in order.
        copies: documents, by split, that the merge removes as copies. Their ids are not checked.
        report: progress callback, called with the number of sidecars just read.

    Raises:
        DuplicateIdError: documents of two corpora have the same id. The message lists ids, corpora and documents.
        CorpusError: a sidecar is missing or damaged.
        StoreError: a store cannot be read.
    """
    with temporary_folder("ids") as folder:
        _write_id_hashes(sources, copies, folder, report)
        pairs = chain.from_iterable(_find_equal_id_pairs(path) for path in sorted(folder.iterdir()))
        found = list(islice(pairs, _LISTED_IDS))
        more = sum(1 for _ in pairs)
    if found:
        raise _equal_ids_error(sources, found, len(found) + more)


def _write_id_hashes(
    sources: Sequence[Corpus],
    copies: DocumentsBySplit,
    folder: Path,
    report: Callable[[int], None],
) -> None:
    """Write a record of every document with an id to one of the files, chosen by the first byte of the id's hash."""
    before = dict.fromkeys(SPLITS, 0)  # number of documents in earlier corpora, by split
    with ExitStack() as files:
        ranges = [files.enter_context((folder / f"{n:03d}").open("wb")) for n in range(_HASH_RANGES)]
        for part, source in enumerate(sources):
            for heldout, split in enumerate(SPLITS):
                for numbers, ids in _read_ids(source, split) if source.manifest.provenance else ():
                    report(1)
                    known = np.array([each is not None for each in ids], dtype=np.bool_)
                    known &= ~np.isin(numbers + before[split], getattr(copies, split).documents)
                    records = _id_records(
                        [each for each, use in zip(ids, known, strict=True) if use and each is not None]
                    )
                    records["part"], records["heldout"] = part, heldout
                    records["document"] = numbers[known]
                    of_range = records["high"] >> np.uint64(56)
                    for chosen in np.unique(of_range):
                        ranges[int(chosen)].write(records[of_range == chosen].tobytes())
                before[split] += int(source.table(split).documents.sum())


def _read_ids(source: Corpus, split: SplitName) -> Iterator[tuple[NDArray[np.int64], list[str | None]]]:
    """Yield for each shard the numbers of its documents in the split, and their ids."""
    table = source.table(split)
    starts = np.cumsum(table.documents) - table.documents
    read = parallel_map(partial(read_document_ids, source), table.shards)
    for shard, (block, document, ids) in zip(table.shards, read, strict=True):
        yield starts[table.first_block_by_shard[shard] + block] + document, ids


def _id_records(ids: Sequence[str]) -> NDArray[np.void]:
    """Return a record for each id with its hash; the other fields are 0."""
    hashes = b"".join(blake2b(each.encode(), digest_size=16).digest() for each in ids)
    both = np.frombuffer(hashes, dtype="<u8").reshape(-1, 2)
    records = np.zeros(len(ids), dtype=_ID_RECORD_DTYPE)
    records["high"], records["low"] = both[:, 0], both[:, 1]
    return records


def _find_equal_id_pairs(path: Path) -> Iterator[tuple[_Location, _Location]]:
    """Yield for each id in two or more corpora its first document, and its first document in another corpus."""
    records = np.fromfile(path, dtype=_ID_RECORD_DTYPE)
    if not len(records):
        return
    records = records[np.lexsort([records[name] for name in reversed(_ID_RECORD_DTYPE.names or ())])]
    same = (np.diff(records["high"]) == 0) & (np.diff(records["low"]) == 0)
    starts = np.flatnonzero(np.append(True, ~same))
    firsts = np.repeat(starts, np.diff(np.append(starts, len(records))))  # index of the first record with the same id
    other = np.flatnonzero(records["part"] != records["part"][firsts])
    _, at = np.unique(firsts[other], return_index=True)
    for second in other[at].tolist():
        yield _decode_location(records[firsts[second]]), _decode_location(records[second])


def _decode_location(record: np.void) -> _Location:
    return int(record["part"]), SPLITS[int(record["heldout"])], int(record["document"])


def _equal_ids_error(
    sources: Sequence[Corpus], pairs: Sequence[tuple[_Location, _Location]], count: int
) -> DuplicateIdError:
    """Return the error for `count` ids of documents in two corpora. `pairs`: documents of the first of these ids."""
    lines = [_format_pair(sources, pair) for pair in pairs]
    more = [f"and {count - len(pairs):,} more"] if count > len(pairs) else []
    later = sorted({later[0] for _, later in pairs})
    return DuplicateIdError(
        "\n".join([f"{count:,} ids name different documents in two corpora:", *lines, *more]),
        remedy=f"give the documents of {', '.join(sources[part].store.uri for part in later)} ids of their own, or "
        "leave these documents out of the corpora; only copies of a text may share an id",
    )


def _format_pair(sources: Sequence[Corpus], pair: tuple[_Location, _Location]) -> str:
    places = [f"{split}:{number} of {sources[part].store.uri}" for part, split, number in pair]
    part, split, number = pair[0]
    return f"  {_read_document_id(sources[part], split, number)!r}: {' and '.join(places)}"


def _read_document_id(source: Corpus, split: SplitName, number: int) -> str | None:
    """Return the id of document `number` of a split."""
    table = source.table(split)
    block, document = locate_document_in_block(source, split, number)
    in_shard = block - table.first_block_by_shard[table.block_shard_key(block)]
    where: RowConditions = [("block", "==", in_shard), ("document", "==", document)]
    return next(read_origins(source, split, table.block_shard_key(block), where)).provenance.id
