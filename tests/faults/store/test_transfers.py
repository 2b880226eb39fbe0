"""Uploads and reads that break off go on where they did, and leave nothing when they are given up."""

import os
import threading
from pathlib import Path

import pytest

from data_service.store.base import Store
from data_service.store.errors import StoreUnavailable
from data_service.store.open import open_store
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.gcs import FakeGcs
from tests.support.stores.s3 import DATA, S3Server
from tests.support.stores.service import Service

S3_ONLY = pytest.mark.parametrize("service", ["s3"], indirect=True)
PART = {"s3": "partNumber=", "gs": "partNumber=", "az": "comp=block&"}
"""What is in the path of a request that sends a part."""
LARGE = {"s3": 40 << 20, "gs": 18 << 20, "az": 18 << 20}
"""Bytes of an object that is sent in three parts, and read in several pieces."""
END = {"s3": ("POST", "uploadId="), "gs": ("POST", "uploadId="), "az": ("PUT", "comp=blocklist")}
"""Method and part of the path of the request that makes an object of parts."""


def test_a_failed_part_is_sent_again_and_no_other(
    service: Service, store: Store, faults: FaultProxy, tmp_path: Path
) -> None:
    data = os.urandom(LARGE[service.scheme])
    (tmp_path / "file").write_bytes(data)
    faults.only = lambda method, path: PART[service.scheme] in path
    faults.plan.extend(["error 500", "reset"])
    store.put_file("large", tmp_path / "file")
    assert store.get("large") == data
    parts = [path for method, path, _ in faults.requests if PART[service.scheme] in path]
    assert len(parts) == 3 + 2


def test_an_upload_of_buffers_survives(store: Store, faults: FaultProxy) -> None:
    faults.plan.extend(["slow down", "reset"])
    store.put_buffers("buffers", [memoryview(DATA), memoryview(DATA)])
    assert store.get("buffers") == DATA + DATA


@pytest.mark.rgw
def test_unfinished_uploads_are_aborted_when_old(rgw: S3Server) -> None:
    bucket = rgw.new_bucket()
    client = rgw.client()
    for key in ("runs/a/data", "runs/ab/data"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    store = open_store(f"s3://{bucket}/runs")
    assert store.remove_leftovers("a", older_than_key="absent") == 0
    assert store.remove_leftovers("a", older_than_key=None) == 1
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Key"] for upload in left] == ["runs/ab/data"]


@pytest.mark.long
def test_a_read_goes_on_where_it_broke(service: Service, store: Store, faults: FaultProxy) -> None:
    data = os.urandom(LARGE[service.scheme])
    store.put("large", data)
    sizes: list[int] = []

    def half(method: str, whole: bytes) -> bytes | None:
        sizes.append(len(whole))
        return whole[: len(whole) // 2] if len(sizes) < 3 else None

    faults.mangle = half
    assert store.get("large") == data
    assert sizes[1] < 0.7 * sizes[0]
    assert sizes[2] < 0.7 * sizes[1]


@pytest.mark.long
def test_an_object_replaced_while_it_is_read_is_never_mixed(service: Service, store: Store, faults: FaultProxy) -> None:
    size = LARGE[service.scheme]
    old, new = bytes(size), os.urandom(size)
    store.put("large", old)
    other = open_store(store.uri)
    first = threading.Event()

    def replace(method: str, whole: bytes) -> bytes | None:
        if first.is_set():
            return None
        first.set()
        other.put("large", new)
        return whole[: len(whole) // 2]

    faults.mangle = replace
    assert store.get("large") == new


@pytest.mark.long
@S3_ONLY
def test_a_long_upload_has_patience_left_at_its_end(store: Store, faults: FaultProxy, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 50  # 4 parts of 16 MiB
    (tmp_path / "file").write_bytes(data)
    faults.bytes_per_second = len(data) / 3.5
    faults.only = lambda method, path: "partNumber=4" in path
    faults.plan.extend(["error 500"] * 4)
    open_store(store.uri, patience_s=3.0).put_file("large", tmp_path / "file")
    assert store.get("large") == data
    parts = [path for method, path, _ in faults.requests if method == "PUT"]
    assert len(parts) == 4 + 4
    assert len({path.partition("uploadId=")[2].partition("&")[0] for path in parts}) == 1


@pytest.mark.long
def test_an_upload_whose_end_was_not_answered_is_known(service: Service, store: Store, faults: FaultProxy) -> None:
    data, (end, mark) = os.urandom(LARGE[service.scheme]), END[service.scheme]
    faults.only = lambda method, path: method == end and mark in path
    faults.plan.append("reset after")
    store.put_buffers("large", [memoryview(data)])
    assert not faults.plan
    assert store.get("large") == data
    if service.scheme == "s3":  # the others send it again
        assert len([path for method, path, _ in faults.requests if method == "PUT"]) == 3


@pytest.mark.long
def test_an_upload_of_parts_that_is_given_up_leaves_nothing(
    service: Service, store: Store, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_service.store.cloud_client._PART_RETRIES", 1)
    impatient = open_store(store.uri, patience_s=0.3)
    sent = 0

    def third(method: str, path: str) -> bool:
        nonlocal sent
        sent += PART[service.scheme] in path
        return PART[service.scheme] in path and sent > 2

    faults.only, faults.always = third, "error 500"
    with pytest.raises(StoreUnavailable, match="large"):
        impatient.put_buffers("large", [memoryview(bytes(LARGE[service.scheme]))])
    assert store.size("large") is None
    assert [entry.key for entry in store.list()] == ["key"]
    if isinstance(service, FakeGcs):
        assert not service.buckets[store.uri.split("/")[2]].uploads
    if isinstance(service, S3Server):
        assert "Uploads" not in service.client().list_multipart_uploads(Bucket=store.uri.split("/")[2])


@pytest.mark.rgw
def test_an_upload_that_the_server_forgot_begins_again(rgw: S3Server) -> None:
    data, bucket, client = os.urandom(40 << 20), rgw.new_bucket(), rgw.client()
    told: list[int] = []

    def forget(sent: int) -> None:
        if not told:
            (upload,) = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
            client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        told.append(sent)

    store = open_store(f"s3://{bucket}/runs")
    store.put_buffers("large", [memoryview(data)], forget)
    assert store.get("large") == data
    assert told == sorted(set(told))
    assert told[-1] == len(data)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
