"""S3 behind a network that fails: slow-downs, resets, truncated bodies, lost answers, expired credentials."""

import os
import threading
from pathlib import Path

import pytest
from fault_proxy import Fault, FaultProxy
from s3_server import S3Server

from data_service.store.base import Store
from data_service.store.errors import (
    AccessDenied,
    BadUri,
    CredentialsExpired,
    CredentialsMissing,
    StoreUnavailable,
)
from data_service.store.open import open_store

DATA = os.urandom(100_000)


@pytest.fixture
def store(s3: S3Server, faults: FaultProxy) -> Store:
    """A store behind the proxy, with one object."""
    store = open_store(f"s3://{s3.new_bucket()}/runs")
    store.put("key", DATA)
    faults.requests.clear()
    return store


@pytest.mark.parametrize("fault", ["error 500", "slow down", "reset", "truncate"])
def test_reads_survive(store: Store, faults: FaultProxy, fault: Fault) -> None:
    faults.plan.extend([fault, fault])
    assert store.get("key") == DATA
    faults.plan.append(fault)
    assert store.get_range("key", 1000, 50_000) == DATA[1000:51_000]
    assert not faults.plan
    assert len(faults.requests) == 5


@pytest.mark.parametrize("fault", ["error 500", "slow down", "reset", "reset after"])
def test_writes_survive(store: Store, faults: FaultProxy, fault: Fault) -> None:
    faults.plan.append(fault)
    store.put("other", b"x")
    faults.plan.append(fault)
    store.delete("key")
    faults.plan.append(fault)
    assert [entry.key for entry in store.list()] == ["other"]
    faults.plan.append(fault)
    assert store.size("other") == 1
    assert not faults.plan


@pytest.mark.parametrize("fault", ["error 500", "reset", "reset after"])
def test_a_conditional_put_whose_answer_was_lost_knows_that_it_won(
    store: Store, faults: FaultProxy, fault: Fault
) -> None:
    faults.plan.append(fault)
    assert store.put_if_absent("claim", b"same bytes")
    assert not store.put_if_absent("claim", b"same bytes")


def test_a_conditional_put_whose_answer_was_lost_knows_that_it_lost(store: Store, faults: FaultProxy) -> None:
    assert store.put_if_absent("claim", b"same bytes")
    faults.plan.append("reset after")
    assert not store.put_if_absent("claim", b"same bytes")


def test_a_failed_part_repeats_itself_only(store: Store, faults: FaultProxy, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 50  # 4 parts of 16 MiB
    (tmp_path / "file").write_bytes(data)
    faults.only = lambda method, path: "partNumber=3" in path
    faults.plan.extend(["error 500", "reset"])
    store.put_file("large", tmp_path / "file")
    assert store.get("large") == data
    parts = [path for method, path, _ in faults.requests if method == "PUT"]
    assert len(parts) == 6


def test_silence_is_a_failure_like_others(
    store: Store, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_service.store.s3._SILENCE_S", 0.3)
    hasty = open_store(store.uri)
    faults.plan.extend(["stall", "stall"])
    assert hasty.get("key") == DATA
    faults.plan.append("stall")
    assert hasty.put_if_absent("claim", b"x")
    assert not faults.plan


def test_an_upload_of_buffers_survives(store: Store, faults: FaultProxy) -> None:
    faults.plan.extend(["slow down", "reset"])
    store.put_buffers("buffers", [memoryview(DATA), memoryview(DATA)])
    assert store.get("buffers") == DATA + DATA


def test_renewed_credentials_are_found(
    store: Store, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    faults.plan.append("expired token")
    assert store.get("key") == DATA
    assert [key for _, _, key in faults.requests] == ["test", "renewed"]


@pytest.mark.parametrize(
    ("fault", "kind"), [("error 500", StoreUnavailable), ("expired token", CredentialsExpired)]
)
def test_what_does_not_pass_is_an_error_with_the_uri(
    store: Store, faults: FaultProxy, fault: Fault, kind: type[Exception]
) -> None:
    faults.always = fault
    impatient = open_store(store.uri, patience_s=0.5)
    with pytest.raises(kind, match=f"{store.uri}/key"):
        impatient.get("key")


def test_nobody_there(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreUnavailable, match="AWS_ENDPOINT_URL"):
        open_store("s3://bucket/x", patience_s=0.5).get("key")


def test_an_endpoint_that_is_none(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no-url")
    with pytest.raises(BadUri, match="no-url"):
        open_store("s3://bucket/x").get("key")


def test_no_bucket(s3: S3Server) -> None:
    store = open_store("s3://no-such-bucket/x")
    for operation in (store.get, store.delete, lambda key: store.put(key, b"x")):
        with pytest.raises(BadUri, match="the bucket does not exist"):
            operation("key")
    with pytest.raises(BadUri, match="the bucket does not exist"):
        list(store.list())


def test_no_credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("data_service.store.s3._VALID_BEFORE", threading.Event())
    with pytest.raises(CredentialsMissing, match="credentials"):
        open_store("s3://bucket/x", patience_s=0.5).get("key")


@pytest.mark.rgw
def test_wrong_credentials(rgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = rgw.new_bucket()
    monkeypatch.setattr("data_service.store.s3._VALID_BEFORE", threading.Event())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessDenied, match=bucket):
        open_store(f"s3://{bucket}/x").put("key", b"x")


@pytest.mark.rgw
def test_unfinished_uploads_are_aborted_when_old(rgw: S3Server) -> None:
    bucket = rgw.new_bucket()
    client = rgw.client()
    for key in ("runs/a/data", "runs/ab/data"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    store = open_store(f"s3://{bucket}/runs")
    assert store.remove_leftovers("a", older_than_s=3600) == 0
    assert store.remove_leftovers("a", older_than_s=-60) == 1
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Key"] for upload in left] == ["runs/ab/data"]
