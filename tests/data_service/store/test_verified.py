"""Reads that check what they read."""

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.errors import CorruptBlock
from data_service.store.base import Store, chunk_digests, digest, read_verified
from data_service.store.errors import Truncated
from data_service.store.open import open_store
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server

DAMAGED = CorruptBlock("shard-000.tar is damaged at byte 16", remedy="build it again")


def test_the_digest_is_blake2b_of_16_bytes() -> None:
    assert digest(b"abc") == blake2b(b"abc", digest_size=16).hexdigest()


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 17))
def test_chunk_digests_ignore_where_buffers_end(buffers: list[bytes], chunk: int) -> None:
    whole = b"".join(buffers)
    expected = tuple(digest(whole[start : start + chunk]) for start in range(0, len(whole), chunk))
    assert chunk_digests([memoryview(buffer) for buffer in buffers], chunk) == expected


@pytest.mark.long
def test_damage_at_rest_is_the_callers_error(any_store: Store) -> None:
    data = bytes(range(200))
    any_store.put("key", data)
    assert read_verified(any_store, "key", 16, 100, digest(data[16:116]), DAMAGED) == data[16:116]
    any_store.put("key", data[:50] + b"!" + data[51:])
    with pytest.raises(CorruptBlock, match=r"shard-000\.tar"):
        read_verified(any_store, "key", 16, 100, digest(data[16:116]), DAMAGED)
    any_store.put("key", data[:60])
    with pytest.raises(Truncated):
        read_verified(any_store, "key", 16, 100, digest(data[16:116]), DAMAGED)


@pytest.mark.long
def test_damage_on_the_way_is_read_again(s3: S3Server, faults: FaultProxy) -> None:
    store = open_store(f"s3://{s3.new_bucket()}")
    data = bytes(range(200))
    store.put("key", data)
    faults.only = lambda method, path: method == "GET"
    faults.plan.extend(["garble", "garble"])
    assert read_verified(store, "key", 0, 200, digest(data), DAMAGED) == data
    assert not faults.plan
