"""Removals of a merged corpus that come from its parts, with its numbers of documents and blocks."""

from collections import Counter
from collections.abc import Iterator, Sequence

from data_service.corpus.corpus import Corpus, SplitName
from data_service.corpus.removals import Removal, RemovalChain, RemovedDocuments, load_removals

SPLITS: tuple[SplitName, ...] = ("train", "heldout")


def carried_removals(sources: Sequence[Corpus]) -> Iterator[Removal]:
    """Yield the removals from the sources, with the numbers of documents and blocks in the merged corpus."""
    documents, blocks = Counter[str](), Counter[str]()
    for source in sources:
        for removal in load_removals(source.store, source.manifest).removals:
            moved = {
                split: RemovedDocuments(
                    listed.documents + documents[split],
                    listed.block + blocks[split],
                    listed.start,
                    listed.stop,
                )
                for split, listed in (("train", removal.train), ("heldout", removal.heldout))
            }
            yield Removal(removal.by, removal.at, removal.reason, moved["train"], moved["heldout"])
        for split in SPLITS:
            documents[split] += int(source.table(split).documents.sum())
            blocks[split] += len(source.table(split))


def begins_with(chain: RemovalChain, carried: Sequence[Removal]) -> bool:
    """Return whether the first removals of a chain are these, which are in no chain."""
    return list(map(_fields, chain.removals[: len(carried)])) == list(map(_fields, carried))


def _fields(removal: Removal) -> tuple[object, ...]:
    documents = (removal.train.documents.tolist(), removal.heldout.documents.tolist())
    return removal.by, removal.at, removal.reason, documents
