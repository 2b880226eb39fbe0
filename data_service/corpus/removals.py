"""Removals: documents that were taken out of a corpus after it was built. Manifest and shards keep their bytes.

Each removal is a file next to the manifest: `removals/000001.json` and so on. It names its documents and their tokens,
and the digest of the removal before it, so the list cannot be edited or reordered unnoticed. `removals/head.json` says
how many there are, so that a lost last file is found, too. Files are only ever added: the digest of a removal names the
state of the corpus after it for ever, and a run that was made in that state keeps it.
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
HEAD_KEY = f"{REMOVALS_FOLDER}head.json"
_VERSION = 1
_REMOVAL_KEY = re.compile(rf"{REMOVALS_FOLDER}(\d{{6}})\.json")
_FORMAT = "maskfleet-removal"
_RESTORE_REMEDY = (
    "restore the file from a copy of the corpus; what was removed is not read only while the list is whole"
)


@dataclass(frozen=True)
class RemovedDocuments:
    """D documents of one split, ordered by number.

    Attributes:
        documents: [D] int64, number of each document in its split.
        block: [D] int64, number of its block in the split, ascending.
        start, stop: [D] int64, its tokens in the block.
    """

    documents: NDArray[np.int64]
    block: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[int, int, int, int]]) -> Self:
        """Return a table of rows of (document, block, start, stop), in any order."""
        columns = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4).T
        return cls(*(np.ascontiguousarray(column) for column in columns))

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def token_count(self) -> int:
        """Number of the documents' tokens."""
        return int((self.stop - self.start).sum())

    def filter_documents(self, mask: NDArray[np.bool_]) -> Self:
        """Return some of the documents. `mask`: [D]."""
        return type(self)(*(column[mask] for column in vars(self).values()))

    def moved_by(self, documents: int, blocks: int) -> Self:
        """Return the documents with higher numbers of theirs, and of their blocks."""
        return replace(self, documents=self.documents + documents, block=self.block + blocks)

    def token_ranges(self, block: int) -> NDArray[np.int64]:
        """Return [K, 2] int64, first token and the one behind the last of each of the documents in a block."""
        low, high = np.searchsorted(self.block, (block, block + 1))
        return np.stack([self.start[low:high], self.stop[low:high]], axis=1)


def replace_removed_text(block: Block, stretches: NDArray[np.int64], replacement_id: int) -> Block:
    """Return a block with the id `replacement_id` in place of removed text. All other tokens keep their places.

    `stretches`: [K, 2], as `RemovedDocuments.token_ranges` returns them.
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
    """Documents of a corpus, by split."""

    train: RemovedDocuments
    heldout: RemovedDocuments

    def __len__(self) -> int:
        return len(self.train) + len(self.heldout)

    @property
    def token_count(self) -> int:
        """Number of their tokens."""
        return self.train.token_count + self.heldout.token_count


@dataclass(frozen=True)
class Removal(DocumentsBySplit):
    """The documents of one removal, and its reason.

    Attributes:
        by: user and host, or whatever name was given.
        at: time in seconds since 1970.
        reason: why, in the remover's words.
        previous: digest of the removal before it; empty for the first.
        digest: sha256 (hex) of its content, which includes `previous`; empty until it is written.
    """

    by: str
    at: int
    reason: str
    previous: str = ""
    digest: str = ""


@dataclass(frozen=True)
class RemovalChain:
    """All removals from a corpus up to a state, the oldest first."""

    removals: tuple[Removal, ...] = ()

    @property
    def digest(self) -> str:
        """Digest that names the state: that of the last removal; empty if nothing was removed."""
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
        """Return the number, from 1, of the removal that took a document out; None if it was not removed."""
        for number, removal in enumerate(self.removals, 1):
            documents = getattr(removal, split).documents
            place = int(np.searchsorted(documents, document))
            if place < len(documents) and documents[place] == document:
                return number
        return None

    def prefix_with_digest(self, digest: str) -> "RemovalChain | None":
        """Return the chain as it was when its digest was `digest`; None if it never was."""
        for count in range(len(self.removals) + 1):
            state = RemovalChain(self.removals[:count])
            if state.digest == digest:
                return state
        return None


class _RemovalObject(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _DocumentColumns(_RemovalObject):
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
            raise ValueError("the removed documents are not in order")
        if (np.array(self.start) >= np.array(self.stop)).any():
            raise ValueError("a removed document has no tokens")
        return self


class _RemovalContent(_RemovalObject):
    corpus: str
    previous: str
    by: str
    at: int
    reason: str = Field(min_length=1)
    train: _DocumentColumns
    heldout: _DocumentColumns


class _ChainHead(_RemovalObject):
    count: PositiveInt
    digest: str


def removal_key(number: int) -> str:
    """Return the key of removal `number`, counted from 1."""
    return f"{REMOVALS_FOLDER}{number:06d}.json"


def dump_removal(removal: Removal, corpus: str) -> bytes:
    """Return the bytes of a removal's file. `corpus`: digest of the manifest of the corpus that it is from."""
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
    """Return all removals from the corpus at the root of `store`, after checking that their list is whole.

    Raises:
        CorpusError: a file of the list is damaged, edited, missing, out of order, of another corpus, or written by a
            newer version.
        StoreError: the store cannot be read.
    """
    head = _load_head(store)  # read before the removals are listed, whose number may grow meanwhile
    keys = [entry.key for entry in store.list(REMOVALS_FOLDER)]
    numbered = [key for key in keys if key != HEAD_KEY]
    for number, key in enumerate(numbered, 1):
        if _REMOVAL_KEY.fullmatch(key) is None:
            _raise_damaged(store, key, "it is no removal, and does not belong into this folder")
        if key != removal_key(number):
            _raise_damaged(store, removal_key(number), f"it is missing, but {key} is there")
    found = parallel_map(store.get, numbered)
    chain = RemovalChain()
    for key, data in zip(numbered, found, strict=True):
        removal = parse_removal(data, store, key, manifest)
        if removal.previous != chain.digest:
            _raise_damaged(store, key, "it does not follow the removal before it: the list was edited or reordered")
        chain = RemovalChain((*chain.removals, removal))
    if head is not None:
        _check_head(store, head, chain)
    return chain


def load_removals_up_to(store: Store, manifest: CorpusManifest, digest: str) -> RemovalChain:
    """Return the removals from a corpus up to the state named `digest`; later ones are left out.

    Raises:
        CorpusError: as `load_removals`, or the corpus never was in that state.
        StoreError: the store cannot be read.
    """
    found = load_removals(store, manifest).prefix_with_digest(digest) if digest else RemovalChain()
    if found is None:
        raise CorpusError(
            f"{store.uri}: the removal {digest[:12]} is missing, by which this run left documents out",
            remedy=f"restore {REMOVALS_FOLDER} from a copy of the corpus, or the run would read removed documents",
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
        _raise_damaged(store, key, f"it is of the corpus with digest {content.corpus[:12]}")
    splits = {}
    for split, table in (("train", manifest.train), ("heldout", manifest.heldout)):
        listed: _DocumentColumns = getattr(content, split)
        splits[split] = RemovedDocuments(*(np.array(column, dtype=np.int64) for column in vars(listed).values()))
        if not _has_documents(splits[split], table):
            _raise_damaged(store, key, f"it names documents of {split} that the corpus does not have")
    about = (content.by, content.at, content.reason, content.previous)
    return Removal(splits["train"], splits["heldout"], *about, stored.digest)


def append_removal(
    store: Store, manifest: CorpusManifest, chain: RemovalChain, removal: Removal
) -> RemovalChain | None:
    """Write `removal` behind `chain` and return the longer chain; None, with nothing written, if another came first.

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
    """Compare a chain with `head.json`, which is written after each removal: it may be behind, but never ahead."""
    if head.count > len(chain.removals):
        _raise_damaged(store, removal_key(len(chain.removals) + 1), f"it is missing; there were {head.count}")
    if chain.removals[head.count - 1].digest != head.digest:
        _raise_damaged(store, removal_key(head.count), f"{HEAD_KEY} names another digest: the list was edited")


def _has_documents(removed: RemovedDocuments, table: BlockTable) -> bool:
    """Return whether a table of blocks has all of these documents."""
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
