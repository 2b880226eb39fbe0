"""The block tables of a large corpus: one object per split holds binary columns, each read when it is first used.

    blocks/train-<digest>.bin     the columns of `manifest.DTYPES`, one after another, little-endian

The manifest holds the object's key and the digest of each column, so a column is verified by itself. A process that
reads blocks needs only their byte ranges; one that plans which rows are read needs only their counts. As JSON, two
million blocks take 1.4 GB of memory while they are parsed; here a block takes at most 60 bytes.
"""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from data_service.corpus.manifest import DTYPES, BlockTable
from data_service.errors import damaged_corpus
from data_service.store.base import Store, digest, read_verified
from data_service.store.errors import KeyMissing, Truncated

MIN_BLOCKS_STORED_APART = 1 << 16  # a corpus with so many blocks or more stores its tables as binary columns
COLUMNS_FOLDER = "blocks/"  # folder of these objects in a corpus


class StoredTable(BaseModel):
    """The entry in the manifest for a block table whose columns are stored in an object of their own.

    Attributes:
        shards: keys of the shards.
        blocks: number of blocks.
        key: key of the object that holds the columns.
        digests: blake2b hash (16 bytes, hex) of each column's bytes, by the column's name.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    shards: list[str]
    blocks: NonNegativeInt
    key: str
    digests: dict[str, str]


def describe_stored_table(table: BlockTable, split: str) -> StoredTable:
    """Return the manifest's entry for `table`, which `write_columns` stores. `split`: name of the table's split."""
    digests = {name: digest(column.data.cast("B")) for name, column in _columns_in_stored_dtypes(table).items()}
    name = digest("".join(digests.values()).encode())
    return StoredTable(
        shards=list(table.shards),
        blocks=len(table),
        key=f"{COLUMNS_FOLDER}{split}-{name}.bin",
        digests=digests,
    )


def write_columns(store: Store, table: BlockTable, stored: StoredTable) -> None:
    """Write the object that holds the columns of `table`. `store`: the store at the corpus root."""
    store.put_buffers(
        stored.key,
        [memoryview(column.data).cast("B") for column in _columns_in_stored_dtypes(table).values()],
    )


def _columns_in_stored_dtypes(table: BlockTable) -> dict[str, NDArray[Any]]:
    return {name: np.ascontiguousarray(table.columns[name], dtype=kind) for name, kind in DTYPES.items()}


def open_table(store: Store, stored: StoredTable) -> BlockTable:
    """Return the block table that `stored` describes in the corpus at `store`. Its columns are read when first used."""
    return BlockTable(stored.blocks, tuple(stored.shards), StoredColumns(store, stored))


class StoredColumns(Mapping[str, NDArray[Any]]):
    """The columns of a stored table by name. Each is read at its first use and cached. The mapping is thread-safe.

    Raises:
        CorpusError: the object is missing or too short, its digest does not match, or it names an unknown shard.
        StoreError: the store cannot be read.
    """

    def __init__(self, store: Store, stored: StoredTable) -> None:
        self._store, self._stored = store, stored
        self._kept: dict[str, NDArray[Any]] = {}
        self._lock = threading.Lock()

    @property
    def key(self) -> str:
        """Key of the object that holds the columns."""
        return self._stored.key

    def __getitem__(self, name: str) -> NDArray[Any]:
        with self._lock:
            if name not in self._kept:
                self._kept[name] = self._read_column(name)
            return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(DTYPES)

    def __len__(self) -> int:
        return len(DTYPES)

    def _read_column(self, name: str) -> NDArray[Any]:
        stored, sizes = self._stored, {key: np.dtype(kind).itemsize for key, kind in DTYPES.items()}
        names = list(DTYPES)
        start = stored.blocks * sum(sizes[before] for before in names[: names.index(name)])
        length = stored.blocks * sizes[name]
        place = f"{self._store.uri.rstrip('/')}/{stored.key}"
        mismatch = damaged_corpus(place, f"column {name}, bytes {start} to {start + length}, does not match its hash")
        try:
            data = read_verified(
                self._store,
                stored.key,
                start=start,
                length=length,
                expected=stored.digests[name],
                error_on_mismatch=mismatch,
            )
        except (KeyMissing, Truncated) as error:
            raise damaged_corpus(place, error.problem) from error
        column: NDArray[Any] = np.frombuffer(data, dtype=DTYPES[name])
        if name == "shard" and len(column) and not 0 <= column.min() <= column.max() < len(stored.shards):
            raise damaged_corpus(place, f"a block names shard {column.max()}, but there are {len(stored.shards)}")
        return column
