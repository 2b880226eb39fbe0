"""Merges corpora without copying their shards: the merged manifest lists the shards of the corpora (its parts).

Documents and blocks are numbered through all parts in order. The removals of the parts become the first removals of the
merged corpus. One more removal takes out copies: documents with the same tokens as a document of an earlier part. So
copies are never read, but stay in the shards, and no document's number changes.

The merge is refused if documents of two parts have the same id, unless one is a copy of the other (`merged_ids.py`).

Document hashes are sorted in temporary files, one range of hashes at a time, so memory does not grow with the parts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.corpus import SPLITS, Corpus, open_corpus
from data_service.corpus.manifest import (
    CONFIGURATION_KEY,
    DTYPES,
    MANIFEST_KEY,
    BlockTable,
    CorpusManifest,
    CorpusPart,
    HeldoutRule,
    StoredFile,
    sidecar_key,
)
from data_service.corpus.manifest_file import claim_output, save_manifest, with_digest
from data_service.corpus.merged_ids import DuplicateIdError, check_unique_ids
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
)
from data_service.corpus.remove import carried_removals, chain_begins_with, split_by_removed
from data_service.errors import CorpusError
from data_service.processes import temporary_folder
from data_service.store.base import Store, parallel_map
from data_service.store.open import open_store
from data_service.tokenizers.loss import TextLoss
from data_service.types import Block

ReportBlocks = Callable[[int, int], None]
"""Progress callback, called as (newly read, total): numbers of blocks and sidecars together."""

DUPLICATE_REMOVAL_REASON = "copies of documents of earlier parts"
"""The `Removal.reason` of the removal that takes out copies."""

_HASH_RANGES = 256  # number of files of document hashes: one for each first byte of a hash
_HASH_RECORD_DTYPE = np.dtype(  # a document: its hash as two words, part, whether held out, numbers, and token range
    [("high", "<u8"), ("low", "<u8"), ("part", "<u4"), ("heldout", "<u4")]
    + [(name, "<i8") for name in ("document", "block", "start", "stop")]
)


@dataclass(frozen=True)
class MergeReport:
    """The result of a merge.

    Attributes:
        documents: number of documents of all parts.
        copies: number of copies that this merge removed.
        earlier_copies: number of copies that earlier merges had removed from the parts.
        removed: number of other documents that had been removed from the parts.
    """

    documents: int
    copies: int
    earlier_copies: int
    removed: int


def merge_corpora(
    uris: Sequence[str],
    output: str,
    *,
    removed_by: str,
    removed_at: int,
    report: ReportBlocks = lambda done, total: None,
) -> MergeReport:
    """Merge corpora, in this order, into one at `output`. It refers to their shards, so they must not be moved.

    The same call repeats an interrupted merge. After a complete merge, it only returns the report.

    Args:
        uris: at least two corpora, which may be merged ones.
        output: folder or s3:// prefix that holds nothing else.
        removed_by: user and host, recorded in the removal of the copies.
        removed_at: seconds since 1970.
        report: progress callback, called in this thread.

    Raises:
        CorpusError: the corpora differ in tokenizer or options, `output` holds another corpus, or one is damaged.
        DuplicateIdError: documents of two of the corpora have the same id.
        CorruptBlock, StoreError: a block cannot be read, or a store cannot be used.
    """
    sources = [open_corpus(uri) for uri in uris]
    check_mergeable(sources)
    store = open_store(output)
    if (known := _complete_merge_report(sources, store)) is not None:
        return known
    claim_output(store, {"merge": [source.manifest.digest for source in sources]})
    try:
        return join_corpora(sources, store, removed_by=removed_by, removed_at=removed_at, report=report)
    except DuplicateIdError:
        store.delete(CONFIGURATION_KEY)  # frees the output folder for a merge of other corpora
        raise


def _complete_merge_report(sources: Sequence[Corpus], store: Store) -> MergeReport | None:
    """Return the report of this merge if `store` already holds its result, after deleting leftover temporary files.

    None: the merge is not complete, or documents were removed from a source since.
    """
    if store.size(MANIFEST_KEY) is None:
        return None
    merged, carried = open_corpus(store.uri).manifest, [*carried_removals(sources)]
    chain = load_removals(store, merged)
    if merged.digest != with_digest(_merged_manifest(sources)).digest or not chain_begins_with(chain, carried):
        return None
    store.delete(CONFIGURATION_KEY)
    store.remove_leftovers("", older_than_key=MANIFEST_KEY)
    return _merge_report(merged, chain, len(carried))


def join_corpora(
    sources: Sequence[Corpus],
    store: Store,
    *,
    removed_by: str,
    removed_at: int,
    report: ReportBlocks = lambda done, total: None,
) -> MergeReport:
    """Write the manifest, removals and tokenizer of the merged corpus to `store`, which `claim_output` reserved.

    Raises as `merge_corpora`.
    """
    store.delete_many([entry.key for entry in store.list(REMOVALS_FOLDER)])
    manifest = with_digest(_merged_manifest(sources))
    sidecars = sum(len(source.manifest.provenance) for source in sources)
    total = sidecars + sum(len(source.table(split)) for source in sources for split in SPLITS)
    copies = _find_copies(sources, lambda done, _: report(done, total))
    check_unique_ids(sources, copies, lambda done: report(done, total))
    chain, carried = RemovalChain(), [*carried_removals(sources)]
    for removal in carried:
        chain = _record_removal(store, manifest, chain, removal)
    new, _ = split_by_removed(copies, chain)
    if len(new):
        removal = Removal(new.train, new.heldout, removed_by, removed_at, DUPLICATE_REMOVAL_REASON)
        chain = _record_removal(store, manifest, chain, removal)
    for key in manifest.tokenizer_files:
        store.put(key, sources[0].store.get(key))
    save_manifest(store, manifest)
    store.delete(CONFIGURATION_KEY)
    store.remove_leftovers("", older_than_key=None)
    return _merge_report(manifest, chain, len(carried))


def _merge_report(manifest: CorpusManifest, chain: RemovalChain, carried: int) -> MergeReport:
    """Return the report of a merge whose first `carried` removals come from its parts."""
    sizes = [(len(one), one.reason == DUPLICATE_REMOVAL_REASON) for one in chain.removals]
    return MergeReport(
        documents=sum(int(table.documents.sum()) for table in (manifest.train, manifest.heldout)),
        copies=sum(size for size, are_copies in sizes[carried : carried + 1] if are_copies),
        earlier_copies=sum(size for size, are_copies in sizes[:carried] if are_copies),
        removed=sum(size for size, are_copies in sizes[:carried] if not are_copies),
    )


def check_mergeable(sources: Sequence[Corpus]) -> None:
    """Raise CorpusError if there are fewer than two different corpora, or their tokenizers or build options differ."""
    if len({source.manifest.digest for source in sources}) < max(2, len(sources)):
        raise CorpusError(
            "a merge needs two corpora or more, each given once",
            remedy="give at least two different corpora",
        )
    shared = _rule_for_unknown_words([source.manifest for source in sources])
    facts = [
        {
            "tokenizer": source.manifest.tokenizer_hash,
            "held-out share": source.manifest.heldout_fraction,
            "held-out rule": _comparable_rule(source.manifest, shared),
            "texts of an example": source.manifest.pairs,
            "segmentation": source.manifest.words,
            "version of the word rules": source.manifest.word_rules_version,
            "provenance": bool(source.manifest.provenance),
        }
        for source in sources
    ]
    for source, its in zip(sources[1:], facts[1:], strict=True):
        unlike = [f"{name}: {facts[0][name]} and {value}" for name, value in its.items() if value != facts[0][name]]
        if unlike:
            raise CorpusError(
                f"{sources[0].store.uri} and {source.store.uri} cannot be merged: {'; '.join(unlike)}",
                remedy="build one of them again with the other's tokenizer and options, and with --heldout-like",
            )


def _summed_text_loss(manifests: Sequence[CorpusManifest]) -> TextLoss | None:
    """Return the characters that the tokenizer loses in all corpora together; None if one corpus has no count."""
    known = [manifest.loss for manifest in manifests if manifest.loss is not None]
    return TextLoss.sum_of(known) if len(known) == len(manifests) else None


def _merged_manifest(sources: Sequence[Corpus]) -> CorpusManifest:
    """Return the manifest of the merged corpus."""
    parts: list[CorpusPart] = []
    tables: dict[str, list[BlockTable]] = {split: [] for split in SPLITS}
    sizes, digests, sidecars = dict[str, int](), dict[str, str](), dict[str, StoredFile]()
    for source in sources:
        manifest, first = source.manifest, len(parts)
        parts += corpus_parts(source)
        moved = {key: _merged_key(key, first, bool(manifest.parts)) for key in manifest.shard_sizes}
        sizes |= {moved[key]: size for key, size in manifest.shard_sizes.items()}
        digests |= {moved[key]: digest for key, digest in manifest.shard_digests.items()}
        if manifest.provenance:
            sidecars |= {sidecar_key(moved[key]): manifest.provenance[sidecar_key(key)] for key in moved}
        for split in SPLITS:
            table = source.table(split)
            tables[split].append(replace(table, shards=tuple(moved[key] for key in table.shards)))
    manifests, first_of_all = [source.manifest for source in sources], sources[0].manifest
    return replace(
        first_of_all,
        train=_concatenate_tables(tables["train"]),
        heldout=_concatenate_tables(tables["heldout"]),
        unigram=np.sum([manifest.unigram for manifest in manifests], axis=0),
        shard_sizes=sizes,
        shard_digests=digests,
        counts=dict(sum((Counter(manifest.counts) for manifest in manifests), Counter())),
        options={
            "rules": first_of_all.options.get("rules", 1),
            "merged": [_absolute_uri(s.store.uri) for s in sources],
        },
        document_lengths=tuple(map(sum, zip_longest(*(m.document_lengths for m in manifests), fillvalue=0))),
        skipped=(),
        left_out=(),
        provenance=sidecars,
        loss=_summed_text_loss(manifests),
        parts=tuple(parts),
        recorded="",
        digest="",
    ).with_heldout_rule(_merged_heldout_rule(manifests))


def _rule_for_unknown_words(manifests: Sequence[CorpusManifest]) -> HeldoutRule:
    """Return the held-out rule of the first corpus that may have unknown tokens, or else of the first corpus."""
    return next((one for one in manifests if one.may_have_unknown_tokens), manifests[0]).effective_heldout_rule


def _comparable_rule(manifest: CorpusManifest, shared: HeldoutRule) -> HeldoutRule:
    """Return the held-out rule for comparison: without clusters; `by_tokens` is `shared`'s where it has no effect."""
    rule = manifest.effective_heldout_rule
    by_tokens = rule.by_tokens if manifest.may_have_unknown_tokens else shared.by_tokens
    return replace(rule, clusters="", by_tokens=by_tokens)


def _merged_heldout_rule(manifests: Sequence[CorpusManifest]) -> HeldoutRule:
    """Return the held-out rule of the merged corpus: that of the parts, with one digest of the clusters of all."""
    rule = _rule_for_unknown_words(manifests)
    clusters = sorted({manifest.effective_heldout_rule.clusters for manifest in manifests})
    if len(clusters) == 1:
        return rule
    return replace(rule, clusters=blake2b("".join(clusters).encode(), digest_size=16).hexdigest())


def corpus_parts(source: Corpus) -> tuple[CorpusPart, ...]:
    """Return the corpora in which the shards of a corpus lie: its parts, or the corpus itself."""
    return source.manifest.parts or (CorpusPart(_absolute_uri(source.store.uri), source.manifest.digest),)


def _merged_key(key: str, first_part: int, is_source_merged: bool) -> str:
    """Return the merged corpus's key for a source's shard `key`. `first_part`: number of the source's first part."""
    if not is_source_merged:
        return key_of_part_object(first_part, key)
    _, number, there = key.split("/", 2)  # such as parts/0/train/000000.tar
    return key_of_part_object(first_part + int(number), there)


def _absolute_uri(uri: str) -> str:
    return uri if "://" in uri else str(Path(uri).absolute())


def _concatenate_tables(tables: Sequence[BlockTable]) -> BlockTable:
    """Return one table of the blocks of all tables, in order."""
    shards = np.cumsum([0, *(len(table.shards) for table in tables)])
    columns: dict[str, NDArray[Any]] = {
        name: np.concatenate([table.columns[name] for table in tables]) for name in DTYPES
    }
    columns["shard"] = np.concatenate([table.shard + np.int32(n) for table, n in zip(tables, shards, strict=False)])
    keys = tuple(key for table in tables for key in table.shards)
    return BlockTable(sum(map(len, tables)), keys, columns)


def _record_removal(store: Store, manifest: CorpusManifest, chain: RemovalChain, removal: Removal) -> RemovalChain:
    """Append a removal to the merged corpus. Raises CorpusError: another process has added one."""
    longer = append_removal(store, manifest, chain, removal)
    if longer is None:
        raise CorpusError(
            f"another merge is writing to {store.uri}",
            remedy="wait until that merge ends, or give another folder with --out",
        )
    return longer


def _find_copies(sources: Sequence[Corpus], report: ReportBlocks) -> DocumentsBySplit:
    """Return the documents, by split, that are copies of a document of an earlier part. Every block is read."""
    with temporary_folder("merge") as folder:
        _write_hashes(sources, folder, report)
        found = [_find_later_duplicates(path) for path in sorted(folder.iterdir())]
    copies = np.concatenate([np.zeros(0, dtype=_HASH_RECORD_DTYPE), *found])
    train, heldout = (np.sort(copies[copies["heldout"] == number], order="document") for number in range(2))
    return DocumentsBySplit(_removed_documents(train), _removed_documents(heldout))


def _removed_documents(records: NDArray[np.void]) -> RemovedDocuments:
    return RemovedDocuments(*(records[name].astype(np.int64) for name in ("document", "block", "start", "stop")))


def _write_hashes(sources: Sequence[Corpus], folder: Path, report: ReportBlocks) -> None:
    """Write a record of every document to one of `_HASH_RANGES` files, chosen by the first byte of its hash."""
    total = sum(len(source.table(split)) for source in sources for split in SPLITS)
    # Merged numbers, by split, of the block being read and of its first document.
    first, before = Counter[str](), Counter[str]()
    with ExitStack() as files:
        ranges = [files.enter_context((folder / f"{n:03d}").open("wb")) for n in range(_HASH_RANGES)]
        for part, source in enumerate(sources):
            for number, split in enumerate(SPLITS):
                table = source.table(split)
                for block in parallel_map(partial(read_block, source.store, table), range(len(table))):
                    records = _document_records(block, pairs=source.manifest.pairs is not None)
                    records["part"], records["heldout"], records["block"] = part, number, first[split]
                    records["document"] += before[split]
                    first[split] += 1
                    before[split] += len(records)
                    of_range = records["high"] >> np.uint64(56)
                    for chosen in np.unique(of_range):
                        ranges[int(chosen)].write(records[of_range == chosen].tobytes())
                    report(1, total)


def _document_records(block: Block, *, pairs: bool) -> NDArray[np.void]:
    """Return a record of each document of a block: hash of its tokens, number in the block, and token range.

    `pairs`: whether the block is of a corpus of pairs; then the hash also covers where each text ends.
    """
    edges, tokens = block.sentences[block.documents], block.tokens.astype("<u4")
    ends = np.split(block.sentences[1:], block.documents[1:-1]) if pairs else []
    hashes = bytearray()
    for number, (start, stop) in enumerate(pairwise(edges.tolist())):
        content = blake2b(tokens[start:stop].data, digest_size=16)
        if pairs:
            content.update((ends[number] - start).astype("<i8").tobytes())
        hashes += content.digest()
    both = np.frombuffer(hashes, dtype="<u8").reshape(-1, 2)
    records = np.zeros(len(edges) - 1, dtype=_HASH_RECORD_DTYPE)
    records["high"], records["low"] = both[:, 0], both[:, 1]
    records["document"], records["start"], records["stop"] = np.arange(len(records)), edges[:-1], edges[1:]
    return records


def _find_later_duplicates(path: Path) -> NDArray[np.void]:
    """Return the records in a file whose hash also occurs in an earlier part."""
    records = np.fromfile(path, dtype=_HASH_RECORD_DTYPE)
    if not len(records):
        return records
    records = records[np.lexsort((records["part"], records["low"], records["high"]))]
    new = np.append(True, (np.diff(records["high"]) != 0) | (np.diff(records["low"]) != 0))
    first_part = records["part"][np.flatnonzero(new)][np.cumsum(new) - 1]
    later: NDArray[np.void] = records[records["part"] > first_part]
    return later
