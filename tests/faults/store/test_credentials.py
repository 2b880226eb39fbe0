"""Credentials that are slow to come, missing, half written, expired or wrong."""

import re
import threading
import time
from pathlib import Path

import pytest

from data_service.store.base import Store
from data_service.store.errors import AccessDenied, CredentialsExpired, CredentialsMissing
from data_service.store.open import open_store
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import DATA, MetadataService, S3Server
from tests.support.stores.service import Service

CLOUDS = pytest.mark.parametrize(
    "service", ["gs", pytest.param("az", marks=[pytest.mark.azurite, pytest.mark.long])], indirect=True
)
S3_ONLY = pytest.mark.parametrize("service", ["s3"], indirect=True)


@pytest.fixture
def never_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that has not reached any server yet."""
    monkeypatch.setattr(
        "data_service.store.bucket._CREDENTIALS_ACCEPTED",
        {name: threading.Event() for name in ("s3", "gs", "az")},
    )


def test_renewed_credentials_are_found(
    service: Service, store: Store, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.renew(monkeypatch)
    faults.plan.append("expired token")
    assert store.get("key") == DATA
    (_, _, before), (_, _, after) = faults.requests
    assert before != after


@pytest.mark.long
def test_without_credentials_the_error_names_the_object_and_where_they_are_looked_for(
    service: Service, monkeypatch: pytest.MonkeyPatch, never_valid: None
) -> None:
    uri = f"{service.scheme}://{service.new_bucket()}/x"
    service.take_away(monkeypatch)
    with pytest.raises(CredentialsMissing, match=f"{uri}/key") as caught:
        open_store(uri, patience_s=0.3).get("key")
    wanted = {"s3": "AWS|boto3", "gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "AZURE_CLIENT_ID"}
    assert re.search(wanted[service.scheme], caught.value.remedy)


@CLOUDS
def test_wrong_credentials_are_refused_at_once(
    service: Service, store: Store, monkeypatch: pytest.MonkeyPatch, never_valid: None
) -> None:
    """Of S3 the next test; moto takes any key."""
    service.forge(monkeypatch)
    forged = open_store(store.uri, patience_s=600)
    for operation in (forged.get, forged.size, lambda key: forged.put(key, b"x")):
        with pytest.raises(AccessDenied, match=store.uri.split("/")[2]) as caught:
            operation("key")
        assert not isinstance(caught.value, CredentialsExpired | CredentialsMissing)


@pytest.mark.rgw
def test_wrong_credentials_are_an_error_with_the_bucket(
    rgw: S3Server, monkeypatch: pytest.MonkeyPatch, never_valid: None
) -> None:
    bucket = rgw.new_bucket()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessDenied, match=bucket):
        open_store(f"s3://{bucket}/x").put("key", b"x")


@pytest.mark.long
def test_a_key_that_was_valid_may_be_renewed(store: Store, faults: FaultProxy) -> None:
    faults.plan.extend(["unknown key", "unknown key"])
    assert store.get("key") == DATA
    faults.plan.extend(["unknown key", "unknown key"])  # HEAD, whose refusal has no body, and what asks why
    assert store.size("key") == len(DATA)
    assert not faults.plan


def test_a_key_that_never_was_valid_is_refused_at_once(store: Store, faults: FaultProxy, never_valid: None) -> None:
    faults.always = "unknown key"
    with pytest.raises(AccessDenied):
        store.get("key")
    with pytest.raises(AccessDenied, match=faults.errors["unknown key"][1]):
        store.size("key")


def test_expiry_is_known_from_a_refusal_without_a_body(store: Store, faults: FaultProxy) -> None:
    faults.plan.extend(["expired token", "expired token"])
    assert store.size("key") == len(DATA)
    assert not faults.plan


@pytest.mark.long
@S3_ONLY
@pytest.mark.parametrize("valid_before", [True, False])
def test_a_slow_metadata_service_is_asked_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, valid_before: bool
) -> None:
    known = threading.Event()
    if valid_before:
        known.set()
        monkeypatch.setattr("data_service.store.retries._UNACCEPTED_CREDENTIALS_PATIENCE_S", 0.01)
    monkeypatch.setattr("data_service.store.bucket._CREDENTIALS_ACCEPTED", {"s3": known})
    with MetadataService(refusals=4) as service:
        service.use(monkeypatch)
        assert open_store(store.uri).get("key") == DATA
        assert service.refusals == 0


@pytest.mark.long
@S3_ONLY
def test_a_process_that_never_had_credentials_is_told_soon(
    store: Store, monkeypatch: pytest.MonkeyPatch, never_valid: None
) -> None:
    monkeypatch.setattr("data_service.store.retries._UNACCEPTED_CREDENTIALS_PATIENCE_S", 0.2)
    with MetadataService(refusals=10_000) as service:
        service.use(monkeypatch)
        began = time.monotonic()
        with pytest.raises(CredentialsMissing, match=f"{store.uri}/key"):
            open_store(store.uri).get("key")
        assert time.monotonic() - began < 30


@pytest.mark.long
@S3_ONLY
def test_a_client_made_without_credentials_is_made_anew(
    store: Store, monkeypatch: pytest.MonkeyPatch, never_valid: None
) -> None:
    late = open_store(store.uri, patience_s=0.1)
    with monkeypatch.context() as without:
        without.delenv("AWS_ACCESS_KEY_ID")
        with pytest.raises(CredentialsMissing):
            late.get("key")
    assert late.get("key") == DATA


@pytest.mark.long
@S3_ONLY
def test_half_a_credentials_file_is_read_again(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = test\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    threading.Timer(
        0.5, lambda: file.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    ).start()
    assert open_store(store.uri).get("key") == DATA
