"""The index of a folder of MDS shards: all shards must be there with the sizes that it says, and each is read once."""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.errors import InputError
from data_service.store.base import Store

INDEX = "index.json"
_SUFFIX = ".mds"
_PACKED = "a packed shard that lies there unpacked, too"
_OF_INDEX = "the index of MDS shards"
_NOT_IN_INDEX = "not one of the shards that index.json names"


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    basename: str
    bytes: int


class _Shard(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    raw_data: _Stored
    zip_data: _Stored | None = None


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    shards: list[_Shard]


def beside_shards(
    store: Store, folder: str, names: set[str], sizes: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of files in a folder of MDS shards that are not read: the index, strangers, second forms.

    Args:
        folder: the folder's key, with a slash at its end.
        names: the files in it.
        sizes: bytes of each file of the store, by key.

    Raises:
        InputError: the index cannot be read, or a shard is missing or has another size.
        StoreError: the index cannot be read.
    """
    shards = {name for name in names if _SUFFIX in name}
    if not shards or INDEX not in names:
        return
    yield INDEX, _OF_INDEX
    place = f"{store.uri.rstrip('/')}/{folder}"
    known: set[str] = set()
    for shard in _read(store, folder + INDEX, place).shards:
        forms = [form for form in (shard.raw_data, shard.zip_data) if form is not None]
        there = [form for form in forms if form.basename in names]
        if not there:
            raise InputError(
                f"{place}{forms[-1].basename}: the shard is missing, which {INDEX} names",
                remedy="copy the data set again, whole",
            )
        known |= {form.basename for form in there}
        yield from ((form.basename, _PACKED) for form in there[1:])
        if (size := sizes[folder + there[0].basename]) != there[0].bytes:
            raise InputError(
                f"{place}{there[0].basename} has {size:,} bytes, but {INDEX} says {there[0].bytes:,}",
                remedy="copy the data set again, whole",
            )
    yield from ((name, _NOT_IN_INDEX) for name in sorted(shards - known))


def _read(store: Store, key: str, place: str) -> _Index:
    try:
        return _Index.model_validate_json(store.get(key))
    except ValidationError as error:
        raise InputError(
            f"{place}{INDEX} is no index of MDS shards: {error.errors()[0]['msg']}",
            remedy="copy the data set again, or name the shards themselves",
        ) from error
