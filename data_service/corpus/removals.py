"""Removals: lists of documents taken out of a corpus after its build. Manifest and shards do not change.

Each removal is a file next to the manifest: `removals/000001.json` and so on. It lists documents and their tokens, and
holds the digest of the previous removal, so that edited or reordered files are detected. `removals/head.json` holds the
number of removals, so that a lost last file is detected, too. Removals are never deleted. The digest of a removal
identifies the corpus without all documents removed so far. A training run stores this digest when it is created, and
leaves out the documents removed until then.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NoReturn, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from data_service.corpus.manifest import BlockTable, CorpusManifest
from data_service.errors import CorpusError
from data_service.formats import NEWER_REMEDY, newer_version_message, open_envelope, wrap_in_envelope
from data_service.store.base import Store, parallel_map
from data_service.store.errors import KeyMissing
from data_service.types import Block

REMOVALS_FOLDER = "removals/"
HEAD_KEY = f"{REMOVALS_FOLDER}head.json"  # holds the number of removals and the digest of the last
_VERSION = 1  # version of the format of removal files
_REMOVAL_KEY = re.compile(rf"{REMOVALS_FOLDER}(\d{{6}})\.json")
_FORMAT = "maskfleet-removal"  # value of the key `format` in removal files
_RESTORE_REMEDY = "restore the file from a copy of the corpus; without it, removed documents would be read again"


@dataclass(frozen=True)
class RemovedDocuments:
    """D documents of one split, to be removed or already removed, ordered by number.

    Attributes:
        documents: [D] int64, number of each document in its split.
        block: [D] int64, number of its block in the split, ascending.
        start, stop: [D] int64, the document's first token in the block, and the one after its last.
    """

    documents: NDArray[np.int64]
    block: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[int, int, int, int]]) -> Self:
        """Return the documents given as rows (document, block, start, stop), in any order."""
        columns = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4).T
        return cls(*(np.ascontiguousarray(column) for column in columns))

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def token_count(self) -> int:
        """Number of tokens of all the documents."""
        return int((self.stop - self.start).sum())

    def filter_documents(self, mask: NDArray[np.bool_]) -> Self:
        """Return the documents for which `mask` [D] is true."""
        return type(self)(*(column[mask] for column in vars(self).values()))

    def moved_by(self, documents: int, blocks: int) -> Self:
        """Return them renumbered: `documents` is added to each document's number, `blocks` to its block's."""
        return replace(self, documents=self.documents + documents, block=self.block + blocks)

    def token_ranges(self, block: int) -> NDArray[np.int64]:
        """Return [K, 2] int64: start and stop of the K documents in a block."""
        low, high = np.searchsorted(self.block, (block, block + 1))
        return np.stack([self.start[low:high], self.stop[low:high]], axis=1)


def replace_removed_text(block: Block, stretches: NDArray[np.int64], replacement_id: int) -> Block:
    """Return a block in which `replacement_id` replaces every token of removed documents.

    `stretches`: [K, 2], token ranges of the removed documents, as from `RemovedDocuments.token_ranges`.
    """
    if not len(stretches):
        return block
    removed = np.zeros(len(block.tokens), dtype=np.bool_)
    for start, stop in stretches:
        removed[start:stop] = True
    tokens = block.tokens.copy()
    tokens[removed] = replacement_id
    return replace(block, tokens=tokens, removed=removed)


@dataclass(frozen=True)
class DocumentsBySplit:
    """Documents of a corpus that are removed or to be removed, by split."""

    train: RemovedDocuments
    heldout: RemovedDocuments

    def __len__(self) -> int:
        return len(self.train) + len(self.heldout)

    @property
    def token_count(self) -> int:
        """Number of tokens of all the documents."""
        return self.train.token_count + self.heldout.token_count


@dataclass(frozen=True)
class Removal(DocumentsBySplit):
    """The documents of one removal, who removed them, when and why.

    Attributes:
        by: who removed them: user and host, or another name.
        at: time in seconds since 1970.
        reason: why the documents were removed, as free text.
        previous: digest of the removal before it; empty for the first.
        digest: sha256 (hex) of the file's content, `previous` included; empty until the removal is written.
    """

    by: str
    at: int
    reason: str
    previous: str = ""
    digest: str = ""


@dataclass(frozen=True)
class RemovalChain:
    """All removals from a corpus, or the first few, oldest first."""

    removals: tuple[Removal, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of the last removal, which identifies the whole chain; empty if nothing was removed."""
        return self.removals[-1].digest if self.removals else ""

    def removed_documents(self, split: str) -> RemovedDocuments:
        """Return all removed documents of a split, `train` or `heldout`."""
        parts: list[RemovedDocuments] = [getattr(removal, split) for removal in self.removals]
        columns = [
            np.concatenate([np.zeros(0, dtype=np.int64), *(getattr(part, name) for part in parts)])
            for name in ("documents", "block", "start", "stop")
        ]
        order = np.argsort(columns[0], kind="stable")
        return RemovedDocuments(*(column[order] for column in columns))

    def removal_number(self, split: str, document: int) -> int | None:
        """Return the number, from 1, of the removal that lists a document; None if it was not removed."""
        for number, removal in enumerate(self.removals, 1):
            documents = getattr(removal, split).documents
            place = int(np.searchsorted(documents, document))
            if place < len(documents) and documents[place] == document:
                return number
        return None

    def prefix_with_digest(self, digest: str) -> "RemovalChain | None":
        """Return the chain up to the removal with this digest (empty: none); None if there is no such removal."""
        for count in range(len(self.removals) + 1):
            state = RemovalChain(self.removals[:count])
            if state.digest == digest:
                return state
        return None


class _RemovalObject(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _DocumentColumns(_RemovalObject):  # the fields of `RemovedDocuments`
    documents: list[NonNegativeInt]
    block: list[NonNegativeInt]
    start: list[NonNegativeInt]
    stop: list[PositiveInt]

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if not len(self.documents) == len(self.block) == len(self.start) == len(self.stop):
            raise ValueError("the columns of the removed documents differ in length")
        numbers, blocks = np.array(self.documents), np.array(self.block)
        if (np.diff(numbers) <= 0).any() or (np.diff(blocks) < 0).any():
            raise ValueError("the removed documents are not in ascending order")
        if (np.array(self.start) >= np.array(self.stop)).any():
            raise ValueError("a removed document has no tokens")
        return self


class _RemovalContent(_RemovalObject):  # content of a removal file; `corpus`: digest of the manifest
    corpus: str
    previous: str
    by: str
    at: int
    reason: str = Field(min_length=1)
    train: _DocumentColumns
    heldout: _DocumentColumns


class _ChainHead(_RemovalObject):  # content of head.json
    count: PositiveInt
    digest: str


def removal_key(number: int) -> str:
    """Return the key of removal `number`, counted from 1."""
    return f"{REMOVALS_FOLDER}{number:06d}.json"


def dump_removal(removal: Removal, corpus: str) -> bytes:
    """Return the bytes of a removal's file. `corpus`: digest of the corpus's manifest."""
    content = {
        "corpus": corpus,
        "previous": removal.previous,
        "by": removal.by,
        "at": removal.at,
        "reason": removal.reason,
        "train": _column_lists(removal.train),
        "heldout": _column_lists(removal.heldout),
    }
    body = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return wrap_in_envelope(_FORMAT, _VERSION, body)


def load_removals(store: Store, manifest: CorpusManifest) -> RemovalChain:
    """Return all removals from the corpus at the root of `store`, after checking that no removal is missing.

    Raises:
        CorpusError: a file of the list is damaged, edited, missing, out of order, of another corpus, or written by a
            newer version.
        StoreError: the store cannot be read.
    """
    head = _load_head(store)  # read first, because another process may add removals meanwhile
    keys = [entry.key for entry in store.list(REMOVALS_FOLDER)]
    numbered = [key for key in keys if key != HEAD_KEY]
    for number, key in enumerate(numbered, 1):
        if _REMOVAL_KEY.fullmatch(key) is None:
            _raise_damaged(store, key, "removal files have names such as 000001.json")
        if key != removal_key(number):
            _raise_damaged(store, removal_key(number), f"the file is missing, but {key} exists")
    found = parallel_map(store.get, numbered)
    chain = RemovalChain()
    for key, data in zip(numbered, found, strict=True):
        removal = parse_removal(data, store, key, manifest)
        if removal.previous != chain.digest:
            _raise_damaged(store, key, "its digest of the previous removal is wrong: the list was edited or reordered")
        chain = RemovalChain((*chain.removals, removal))
    if head is not None:
        _check_head(store, head, chain)
    return chain


def load_removals_up_to(store: Store, manifest: CorpusManifest, digest: str) -> RemovalChain:
    """Return the removals from a corpus up to the one with this digest; empty `digest`: none.

    Raises:
        CorpusError: as `load_removals`, or no removal has this digest.
        StoreError: the store cannot be read.
    """
    found = load_removals(store, manifest).prefix_with_digest(digest) if digest else RemovalChain()
    if found is None:
        raise CorpusError(
            f"{store.uri}: removal {digest[:12]} is missing, whose documents this training run must not read",
            remedy=f"restore {REMOVALS_FOLDER} from a copy of the corpus, or training would read removed documents",
        )
    return found


def parse_removal(data: bytes, store: Store, key: str, manifest: CorpusManifest) -> Removal:
    """Return the removal in `data`, the bytes of object `key`. Raises CorpusError, as `load_removals`."""
    try:
        stored = open_envelope(_FORMAT, data)
    except ValueError as error:
        _raise_damaged(store, key, str(error), error)
    if stored.version > _VERSION:
        raise CorpusError(newer_version_message(store.with_prefix(key).uri), remedy=NEWER_REMEDY)
    try:
        content = _RemovalContent.model_validate_json(stored.body)
    except ValidationError as error:
        _raise_damaged(store, key, str(error.errors()[0]["msg"]), error)
    if content.corpus != manifest.digest:
        _raise_damaged(store, key, f"the file belongs to the corpus with digest {content.corpus[:12]}")
    splits = {}
    for split, table in (("train", manifest.train), ("heldout", manifest.heldout)):
        listed: _DocumentColumns = getattr(content, split)
        splits[split] = RemovedDocuments(*(np.array(column, dtype=np.int64) for column in vars(listed).values()))
        if not _has_documents(splits[split], table):
            _raise_damaged(store, key, f"the file lists {split} documents that the corpus does not have")
    about = (content.by, content.at, content.reason, content.previous)
    return Removal(splits["train"], splits["heldout"], *about, stored.digest)


def append_removal(
    store: Store, manifest: CorpusManifest, chain: RemovalChain, removal: Removal
) -> RemovalChain | None:
    """Append `removal` to `chain` and return the longer chain; None, if another process added a removal first.

    Raises StoreError: the store cannot be written.
    """
    number = len(chain.removals) + 1
    data = dump_removal(replace(removal, previous=chain.digest), manifest.digest)
    if not store.put_if_absent(removal_key(number), data):
        return None
    written = parse_removal(data, store, removal_key(number), manifest)
    longer = RemovalChain((*chain.removals, written))
    store.put(HEAD_KEY, json.dumps({"count": number, "digest": longer.digest}).encode())
    return longer


def _load_head(store: Store) -> _ChainHead | None:
    try:
        return _ChainHead.model_validate_json(store.get(HEAD_KEY))
    except KeyMissing:
        return None
    except ValidationError as error:
        _raise_damaged(store, HEAD_KEY, str(error.errors()[0]["msg"]), error)


def _check_head(store: Store, head: _ChainHead, chain: RemovalChain) -> None:
    """Compare a chain with `head.json`, which is written after each removal and so may count fewer, but never more."""
    if head.count > len(chain.removals):
        _raise_damaged(store, removal_key(len(chain.removals) + 1), f"it is missing; there were {head.count} removals")
    if chain.removals[head.count - 1].digest != head.digest:
        _raise_damaged(store, removal_key(head.count), f"{HEAD_KEY} holds another digest for it: the list was edited")


def _has_documents(removed: RemovedDocuments, table: BlockTable) -> bool:
    """Return whether the blocks have these documents and tokens, by the counts in the block table."""
    if not len(removed):
        return True
    if removed.block[-1] >= len(table):
        return False
    ends = np.cumsum(table.documents)[removed.block]
    first = ends - table.documents[removed.block]
    known = (removed.documents >= first) & (removed.documents < ends)
    return bool((known & (removed.stop <= table.tokens[removed.block])).all())


def _column_lists(removed: RemovedDocuments) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in vars(removed).items()}


def _raise_damaged(store: Store, key: str, reason: str, cause: Exception | None = None) -> NoReturn:
    raise CorpusError(f"{store.uri.rstrip('/')}/{key} is damaged: {reason}", remedy=_RESTORE_REMEDY) from cause
