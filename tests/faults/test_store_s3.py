"""S3 behind a network that fails: slow-downs, resets, truncated bodies, lost answers, expired credentials."""

import logging
import os
import ssl
import threading
import time
from pathlib import Path

import pytest
from certificates import self_signed
from fault_proxy import Fault, FaultProxy
from metadata_service import MetadataService
from s3_server import S3Server

from data_service.store.base import Store
from data_service.store.errors import (
    AccessDenied,
    BadUri,
    CredentialsExpired,
    CredentialsMissing,
    StoreError,
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


def test_no_credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch, never_valid: None) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(CredentialsMissing, match="credentials"):
        open_store("s3://bucket/x", patience_s=0.5).get("key")


@pytest.mark.rgw
def test_wrong_credentials(rgw: S3Server, monkeypatch: pytest.MonkeyPatch, never_valid: None) -> None:
    bucket = rgw.new_bucket()
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


@pytest.fixture
def never_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that has not reached any server yet."""
    monkeypatch.setattr("data_service.store.s3._VALID_BEFORE", threading.Event())


def test_a_key_that_was_valid_may_be_renewed(store: Store, faults: FaultProxy) -> None:
    faults.plan.extend(["unknown key", "unknown key"])
    assert store.get("key") == DATA
    faults.plan.extend(["unknown key", "unknown key"])  # HEAD, whose refusal has no body, and what asks why
    assert store.size("key") == len(DATA)
    assert not faults.plan


def test_a_key_that_never_was_valid_is_refused_at_once(
    store: Store, faults: FaultProxy, never_valid: None
) -> None:
    faults.always = "unknown key"
    with pytest.raises(AccessDenied):
        store.get("key")
    with pytest.raises(AccessDenied, match="InvalidAccessKeyId"):
        store.size("key")


def test_expiry_is_known_from_a_refusal_without_a_body(store: Store, faults: FaultProxy) -> None:
    faults.plan.extend(["expired token", "expired token"])
    assert store.size("key") == len(DATA)
    assert not faults.plan


@pytest.mark.parametrize("valid_before", [True, False])
def test_a_slow_metadata_service_is_asked_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, valid_before: bool
) -> None:
    known = threading.Event()
    if valid_before:
        known.set()
        monkeypatch.setattr("data_service.store.patience._FIRST_CREDENTIALS_S", 0.01)
    monkeypatch.setattr("data_service.store.s3._VALID_BEFORE", known)
    with MetadataService(refusals=4) as service:
        service.use(monkeypatch)
        assert open_store(store.uri).get("key") == DATA
        assert service.refusals == 0


def test_a_process_that_never_had_credentials_is_told_soon(
    store: Store, monkeypatch: pytest.MonkeyPatch, never_valid: None
) -> None:
    monkeypatch.setattr("data_service.store.patience._FIRST_CREDENTIALS_S", 0.2)
    with MetadataService(refusals=10_000) as service:
        service.use(monkeypatch)
        began = time.monotonic()
        with pytest.raises(CredentialsMissing, match=f"{store.uri}/key"):
            open_store(store.uri).get("key")
        assert time.monotonic() - began < 30


def test_a_client_made_without_credentials_is_made_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch, never_valid: None
) -> None:
    late = open_store(store.uri, patience_s=0.1)
    with monkeypatch.context() as without:
        without.delenv("AWS_ACCESS_KEY_ID")
        with pytest.raises(CredentialsMissing):
            late.get("key")
    assert late.get("key") == DATA


def test_half_a_credentials_file_is_read_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = test\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    threading.Timer(
        0.5, lambda: file.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    ).start()
    assert open_store(store.uri).get("key") == DATA


def test_tls_that_breaks_in_the_middle_of_a_body(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    bucket = s3.new_bucket()
    with FaultProxy(s3.endpoint, tls=context) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        store = open_store(f"s3://{bucket}/x")
        store.put("key", DATA)
        proxy.plan.extend(["bad record", "bad record"])
        assert store.get("key") == DATA
        assert not proxy.plan
        proxy.always = "bad record"
        with pytest.raises(StoreUnavailable):
            open_store(store.uri, patience_s=0.2).get("key")


def test_a_read_goes_on_where_it_broke(store: Store, faults: FaultProxy) -> None:
    data = os.urandom(40 << 20)
    store.put("large", data)
    sizes: list[int] = []

    def half(method: str, whole: bytes) -> bytes | None:
        sizes.append(len(whole))
        return whole[: len(whole) // 2] if len(sizes) < 3 else None

    faults.mangle = half
    assert store.get("large") == data
    assert sizes[1] < 0.7 * sizes[0]
    assert sizes[2] < 0.7 * sizes[1]


def test_an_object_replaced_while_it_is_read_is_never_mixed(store: Store, faults: FaultProxy) -> None:
    old, new = bytes(40 << 20), os.urandom(40 << 20)
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
    assert len({path.partition("uploadId=")[2] for path in parts}) == 1


def test_an_upload_that_is_given_up_leaves_nothing(s3: S3Server, store: Store, faults: FaultProxy) -> None:
    faults.only = lambda method, path: "partNumber=2" in path
    faults.always = "error 500"
    with pytest.raises(StoreUnavailable, match="large"):
        open_store(store.uri, patience_s=0.3).put_buffers("large", [memoryview(bytes(40 << 20))])
    bucket = store.uri.split("/")[2]
    assert "Uploads" not in s3.client().list_multipart_uploads(Bucket=bucket)
    assert store.size("large") is None


def test_an_upload_whose_end_was_not_answered_is_known(store: Store, faults: FaultProxy) -> None:
    data = os.urandom(40 << 20)
    faults.only = lambda method, path: method == "POST" and "uploadId" in path
    faults.plan.append("reset after")
    store.put_buffers("large", [memoryview(data)])
    assert store.get("large") == data
    assert len([path for method, path, _ in faults.requests if method == "PUT"]) == 3


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


def outage_records(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What anything below data_service.store has said at WARNING or above."""
    ours = (r for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("data_service."))
    return [record.getMessage() for record in ours]


def test_an_outage_is_said_in_one_sentence_and_its_end_in_another(
    store: Store, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults.plan.append("slow down")
    store.get("key")
    assert not outage_records(caplog)  # too short to speak of
    monkeypatch.setattr("data_service.store.outage.QUIET_S", 0.0)
    for _ in range(2):
        faults.plan.extend(["slow down"] * 5)
        store.get("key")
    said = outage_records(caplog)
    assert len(said) == 4
    for outage, end in (said[:2], said[2:]):
        assert "trying again" in outage
        assert store.uri.rpartition("/")[0] in outage
        assert "answers again" in end
    assert not any("\n" in sentence for sentence in said)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", ""])
def test_patience_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MASKFLEET_STORE_PATIENCE_S", text)
    with pytest.raises(StoreError, match="MASKFLEET_STORE_PATIENCE_S"):
        open_store("s3://bucket/x")


def test_patience_is_set_by_the_environment(
    store: Store, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASKFLEET_STORE_PATIENCE_S", "0.4")
    faults.always = "error 500"
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        open_store(store.uri).get("key")
    assert time.monotonic() - began < 20
