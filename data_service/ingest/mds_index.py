"""The index of a folder of MDS shards: all shards must exist with the sizes in the index, and each is read once.

An index may be in a folder above its shards, where Streaming's `merge_index` writes it.
"""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.errors import InputError
from data_service.store.base import Store

INDEX_FILE = "index.json"
_MDS_SUFFIX = ".mds"
_PACKED_REASON = "a compressed copy of a shard"  # this and the next two tell the user why a file is not read
_INDEX_REASON = "the index of MDS shards"
_NOT_IN_INDEX_REASON = "not one of the shards that index.json names"


class _ShardFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    basename: str
    bytes: int


class _IndexedShard(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    raw_data: _ShardFile
    zip_data: _ShardFile | None = None  # the compressed shard


class _ShardIndex(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    shards: list[_IndexedShard]


def find_unread_files(
    store: Store, folder: str, names: set[str], sizes: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of the files that are not read in and below a folder with an index of MDS shards: the index,
    shards that the index does not name, and compressed copies of shards.

    Args:
        folder: the folder's key, with a slash at its end.
        names: names of the files in the folder.
        sizes: bytes of each file of the store, by key.

    Raises:
        InputError: the index cannot be read, or a shard is missing or has another size.
        StoreError: the index cannot be read.
    """
    if INDEX_FILE not in names:
        return
    below = {key[len(folder) :]: size for key, size in sizes.items() if key.startswith(folder)}
    shards = {name for name in below if _MDS_SUFFIX in name.rpartition("/")[2]}
    place = f"{store.uri.rstrip('/')}/{folder}"
    index = _read_index(store, folder + INDEX_FILE, place, must_be_index=bool(shards & names)) if shards else None
    if index is None:
        return
    yield INDEX_FILE, _INDEX_REASON
    known: set[str] = set()
    for shard in index.shards:
        forms = [form for form in (shard.raw_data, shard.zip_data) if form is not None]
        there = [form for form in forms if form.basename in below]
        if not there:
            raise InputError(
                f"{place}{forms[-1].basename}: this shard is missing, although {INDEX_FILE} names it",
                remedy="copy the whole data set again, or give its folders that have an index.json of their own",
            )
        known |= {form.basename for form in there}
        yield from ((form.basename, _PACKED_REASON) for form in there[1:])
        if (size := below[there[0].basename]) != there[0].bytes:
            raise InputError(
                f"{place}{there[0].basename} has {size:,} bytes, but {INDEX_FILE} says {there[0].bytes:,}",
                remedy="copy the whole data set again",
            )
    folders = {"", *(name.rpartition("/")[0] for name in known)}
    strangers = (name for name in sorted(shards - known) if name.rpartition("/")[0] in folders)
    yield from ((name, _NOT_IN_INDEX_REASON) for name in strangers)


def _read_index(store: Store, key: str, place: str, *, must_be_index: bool) -> _ShardIndex | None:
    """Return the index; None if the file is not an index. Raises InputError: it is not, but `must_be_index`."""
    try:
        return _ShardIndex.model_validate_json(store.get(key))
    except ValidationError as error:
        if not must_be_index:
            return None
        raise InputError(
            f"{place}{INDEX_FILE} is not an index of MDS shards: {error.errors()[0]['msg']}",
            remedy="copy the data set again, or give the shards themselves as inputs",
        ) from error
