"""Joins pairs of near duplicates into clusters: the connected components of all pairs, named by their first documents.

An array of parents (4 bytes per document) holds a forest: the parent of a document is an earlier document of its
cluster, or itself. If an earlier stage dropped copies, weights (numbers of input documents that a document represents)
take 4 more bytes each. Pairs are read in blocks; pointer jumping finds the roots of a whole block at once, and the
higher root of each pair gets the lower root as parent (Shiloach and Vishkin, *An O(log n) Parallel Connectivity
Algorithm*, 1982). Each component's root is its lowest document, so the order of pairs and tasks makes no difference.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from data_service.ingest.tasks import TaskReceipt, hash_strings, put_unless_empty
from data_service.prepare.duplicates import CompareHashesReceipt, group_by_chunk, make_clusters_table
from data_service.prepare.layout import ComparingTask, PrepareLayout
from data_service.prepare.near_duplicates import DocumentSignatures, MatchBandsReceipt, NumberDtype
from data_service.store.base import Store, digest

_CHUNK_ROWS = 1 << 20  # pairs or documents per block
_GROUP_DOCUMENTS = 4_000_000  # documents per group of chunks whose clusters are written together
_TASK_MEMBERS = 2_000_000  # cluster members per naming task: about 500 MB of memory
# A member of a cluster: number of the cluster's first document, number of the member, input documents in the cluster.
_MEMBER_DTYPE = np.dtype([("first", "<u8"), ("number", "<u8"), ("size", "<i8")])
DocumentNumbers = NDArray[np.unsignedinteger[Any]]  # [N]: for each document the number of another, its parent or root


@dataclass(frozen=True)
class FormClustersTask(ComparingTask):
    """The task of joining pairs into clusters. `pairs`: (key, size) of each stored file of pairs; `groups`: number of
    the first chunk of each group of chunks whose clusters are written together."""

    signed: DocumentSignatures
    pairs: tuple[tuple[str, int], ...]
    groups: tuple[int, ...]

    stage: ClassVar[str] = "link"

    @property
    def input_bytes(self) -> int:
        return sum(size for _, size in self.pairs)


@dataclass(frozen=True)
class MemberPart:
    """A stored file of the members of clusters. `chunks`: range [first, stop) of chunks in which the clusters' first
    documents lie."""

    key: str
    size: int
    digest: str
    chunks: tuple[int, int]


class FormClustersReceipt(TaskReceipt):
    """The files that hold the members of all clusters."""

    parts: list[MemberPart]


def plan_cluster_task(
    layout: PrepareLayout, kind: str, signed: DocumentSignatures, joined: Sequence[MatchBandsReceipt]
) -> FormClustersTask:
    """Return the task that joins all pairs into clusters."""
    pairs = tuple((key, size) for receipt in joined for key, size in receipt.files.items())
    groups, filled = [0], 0
    for number, chunk in enumerate(signed.chunks):
        if filled and filled + chunk.documents > _GROUP_DOCUMENTS:
            groups.append(number)
            filled = 0
        filled += chunk.documents
    source = hash_strings([signed.digest, *(receipt.digest for receipt in joined)])
    return FormClustersTask(layout, 0, source, kind, signed, pairs, tuple(groups))


def form_clusters(task: FormClustersTask, store: Store, progress: Callable[[int], None]) -> FormClustersReceipt:
    """Join all pairs and write the members of all clusters, by groups of chunks; return the receipt.

    `progress` is called with the number of bytes of pairs read so far.
    """
    starts = task.signed.chunk_starts
    parents = np.arange(starts[-1], dtype=task.signed.dtype)
    for number, chunk in enumerate(task.signed.chunks):
        if chunk.documents > chunk.records:
            unite_components(parents, chunk.read_copy_pairs(store).astype(np.int64) + starts[number])
    done = 0
    for key, size in task.pairs:
        for pairs in _read_pairs(store, key, size, task.signed.dtype):
            unite_components(parents, pairs)
        done += size
        progress(done)
    flatten_trees(parents)
    weights = _read_weights(store, task.signed)
    files, parts = dict[str, int](), list[MemberPart]()
    for chunks in pairwise([*task.groups, len(task.signed.chunks)]):
        for members in _cluster_members(parents, weights, starts[chunks[0]], starts[chunks[1]]):
            key, data = task.output_key(len(parts)), members.tobytes()
            files |= put_unless_empty(store, key, data)
            parts.append(MemberPart(key, len(data), digest(data), chunks))
    return FormClustersReceipt(source=task.source, files=files, parts=parts)


def unite_components(parents: DocumentNumbers, pairs: NDArray[np.int64]) -> None:
    """Join the components of each pair in `pairs` [P, 2], in place in `parents` [N]. A root is its own parent; parents
    are lower than their children."""
    one, other = pairs[:, 0], pairs[:, 1]
    while len(one):
        one, other = _find_roots(parents, one), _find_roots(parents, other)
        apart = one != other
        one, other = one[apart], other[apart]
        low, high = np.minimum(one, other), np.maximum(one, other)
        np.minimum.at(parents, high, low.astype(parents.dtype))


def flatten_trees(parents: DocumentNumbers) -> None:
    """Replace every document's parent by its root, in place."""
    for start in range(0, len(parents), _CHUNK_ROWS):
        stop = min(len(parents), start + _CHUNK_ROWS)
        parents[start:stop] = _find_roots(parents, np.arange(start, stop))


def _find_roots(parents: DocumentNumbers, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the roots of the documents `numbers`, and shorten their paths in `parents`."""
    places = numbers
    while True:
        above = parents[places]
        roots = parents[above]
        if (roots == above).all():
            parents[numbers] = roots
            return roots.astype(np.int64)
        parents[places] = roots
        places = roots.astype(np.int64)


def _read_pairs(store: Store, key: str, size: int, dtype: NumberDtype) -> Iterator[NDArray[np.int64]]:
    """Yield a stored file's pairs of document numbers, [P, 2] at a time."""
    step = _CHUNK_ROWS * 2 * dtype.itemsize
    for start in range(0, size, step):
        data = store.get_range(key, start, min(step, size - start))
        yield np.frombuffer(data, dtype=dtype).reshape(-1, 2).astype(np.int64)


def _read_weights(store: Store, signed: DocumentSignatures) -> NDArray[np.uint32] | None:
    """Return [N]: the number of input documents that each document represents; None if always 1."""
    if not any(chunk.weighted for chunk in signed.chunks):
        return None
    weights = np.ones(signed.chunk_starts[-1], dtype=np.uint32)
    for start, chunk in zip(signed.chunk_starts[:-1], signed.chunks, strict=True):
        if chunk.weighted:
            weights[start : start + chunk.documents] = chunk.read_weights(store)
    return weights


def _cluster_members(
    roots: DocumentNumbers, weights: NDArray[np.uint32] | None, first: int, stop: int
) -> Iterator[NDArray[np.void]]:
    """Yield the members (`_MEMBER_DTYPE`) of clusters of at least two documents whose first document has a number in
    [first, stop), about `_TASK_MEMBERS` at a time."""
    sizes = np.zeros(stop - first, dtype=np.int64)
    for numbers in _documents_with_roots_in(roots, first, stop):
        np.add.at(sizes, roots[numbers].astype(np.int64) - first, _document_weights(weights, numbers))
    held, count = list[NDArray[np.void]](), 0
    for numbers in _documents_with_roots_in(roots, first, stop):
        of_cluster = sizes[roots[numbers].astype(np.int64) - first]
        numbers = numbers[of_cluster > _document_weights(weights, numbers)]
        members = np.empty(len(numbers), dtype=_MEMBER_DTYPE)
        members["first"], members["number"] = roots[numbers], numbers
        members["size"] = sizes[roots[numbers].astype(np.int64) - first]
        held, count = [*held, members], count + len(members)
        if count >= _TASK_MEMBERS:
            yield np.concatenate(held)
            held, count = [], 0
    if count:
        yield np.concatenate(held)


def _documents_with_roots_in(roots: DocumentNumbers, first: int, stop: int) -> Iterator[NDArray[np.int64]]:
    """Yield the numbers of documents whose root is in [first, stop), in blocks. Roots precede their documents."""
    for start in range(first, len(roots), _CHUNK_ROWS):
        piece = roots[start : start + _CHUNK_ROWS]
        yield start + np.flatnonzero((piece >= first) & (piece < stop))


def _document_weights(weights: NDArray[np.uint32] | None, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [N] int64: the number of input documents that each of the documents `numbers` represents."""
    return np.ones(len(numbers), dtype=np.int64) if weights is None else weights[numbers].astype(np.int64)


@dataclass(frozen=True)
class NameClustersTask(ComparingTask):
    """The task of naming the clusters of one file of members, and of writing them for the next pass."""

    signed: DocumentSignatures
    members: MemberPart

    stage: ClassVar[str] = "name"

    @property
    def input_bytes(self) -> int:
        return self.members.size


def plan_naming_tasks(task: FormClustersTask, linked: FormClustersReceipt) -> list[NameClustersTask]:
    """Return one task for each file of cluster members."""
    sources = [hash_strings([task.signed.digest, part.digest]) for part in linked.parts]
    return [
        NameClustersTask(task.layout, index, source, task.kind, task.signed, part)
        for index, (source, part) in enumerate(zip(sources, linked.parts, strict=True))
    ]


def write_members_with_cluster_names(task: NameClustersTask, store: Store) -> CompareHashesReceipt:
    """Write for each chunk which documents are near duplicates of which first document, and the clusters' sizes
    (`make_clusters_table`). Return the receipt."""
    starts = np.array(task.signed.chunk_starts)
    members = np.frombuffer(store.get(task.members.key), dtype=_MEMBER_DTYPE)
    firsts, place = np.unique(members["first"], return_inverse=True)
    names = _cluster_names(store, task, firsts.astype(np.int64))
    numbers = members["number"].astype(np.int64)
    chunk = np.searchsorted(starts, numbers, side="right") - 1
    copies = members["first"] != members["number"]
    table = make_clusters_table(
        ordinals=(numbers - starts[chunk]).astype(np.uint32),
        weights=members["size"],
        copy_of=[names[one] if copy else None for one, copy in zip(place.tolist(), copies.tolist(), strict=True)],
    )
    written, offsets = group_by_chunk(table, chunk.astype(np.uint32), len(task.signed.chunks))
    return CompareHashesReceipt(
        source=task.source,
        files=put_unless_empty(store, task.output_key(), written),
        starts=offsets,
        digest=digest(written),
        copies=int(copies.sum()),
        first_copy=None,
    )


def _cluster_names(store: Store, task: NameClustersTask, firsts: NDArray[np.int64]) -> list[str]:
    """Return the ids of the clusters' first documents. `firsts`: their numbers, ascending."""
    starts = task.signed.chunk_starts
    found = list[str]()
    for number in range(*task.members.chunks):
        begin, end = np.searchsorted(firsts, (starts[number], starts[number + 1])).tolist()
        found += task.signed.chunks[number].read_ids(store, (firsts[begin:end] - starts[number]).tolist())
    return found
