"""Object stores behind a network that fails: slow-downs, resets, truncated bodies, lost answers, outages."""

import ipaddress
import logging
import ssl
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from data_service.store.base import Store
from data_service.store.errors import BadUri, CredentialsExpired, StoreError, StoreUnavailable
from data_service.store.open import open_store
from data_service.store.retries import total_retries
from tests.support.stores.fault_proxy import Fault, FaultProxy
from tests.support.stores.s3 import DATA, S3Server
from tests.support.stores.service import Service

ENDPOINT = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}


def self_signed(folder: Path) -> Path:
    """A PEM file with the key and the certificate, valid for a day."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    secret = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = folder / "server.pem"
    file.write_bytes(secret + certificate.public_bytes(encoding))
    return file


@pytest.mark.long
@pytest.mark.parametrize("fault", ["error 500", "slow down", "reset", "truncate"])
def test_reads_survive(store: Store, faults: FaultProxy, fault: Fault) -> None:
    faults.plan.extend([fault, fault])
    assert store.get("key") == DATA
    faults.plan.append(fault)
    assert store.get_range("key", 1000, 50_000) == DATA[1000:51_000]
    assert not faults.plan
    assert len(faults.requests) == 5


@pytest.mark.parametrize("fault", ["error 500", "slow down", "skewed clock", "reset", "reset after"])
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


@pytest.mark.long
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


@pytest.mark.long
def test_silence_is_a_failure_like_others(
    service: Service, store: Store, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "s3" if service.scheme == "s3" else "cloud_client"
    monkeypatch.setattr(f"data_service.store.{module}._READ_TIMEOUT_S", 0.3)
    hasty = open_store(store.uri)
    faults.plan.extend(["stall", "stall"])
    assert hasty.get("key") == DATA
    faults.plan.append("stall")
    assert hasty.put_if_absent("claim", b"x")
    assert not faults.plan


@pytest.mark.long
@pytest.mark.parametrize(("fault", "kind"), [("error 500", StoreUnavailable), ("expired token", CredentialsExpired)])
def test_what_does_not_pass_is_an_error_with_the_uri(
    store: Store, faults: FaultProxy, fault: Fault, kind: type[Exception]
) -> None:
    faults.always = fault
    impatient = open_store(store.uri, patience_s=0.5)
    with pytest.raises(kind, match=f"{store.uri}/key"):
        impatient.get("key")


def test_a_server_that_nobody_runs_is_an_error_with_the_endpoint(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.reach("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(StoreUnavailable, match=ENDPOINT[service.scheme]):
        open_store(f"{service.scheme}://bucket/x", patience_s=0.5).get("key")


def test_an_endpoint_that_is_none(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT[service.scheme], "no-url")
    with pytest.raises(StoreError, match="no-url"):
        open_store(f"{service.scheme}://bucket/x", patience_s=0.3).get("key")


def test_a_bucket_that_does_not_exist_is_named(service: Service) -> None:
    place = f"{service.scheme}://no-such-bucket"
    store = open_store(f"{place}/x")
    for operation in (store.get, store.delete, lambda key: store.put(key, b"x")):
        with pytest.raises(BadUri, match=f"^{place}: .*(bucket|container)"):
            operation("key")
    with pytest.raises(BadUri, match=f"^{place}: .*(bucket|container)"):
        list(store.list())


@pytest.mark.long
def test_tls_that_breaks_in_the_middle_of_a_body(s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def outage_records(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What anything below data_service.store has said at WARNING or above."""
    ours = (r for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("data_service."))
    return [record.getMessage() for record in ours]


@pytest.mark.long
@pytest.mark.parametrize("service", ["s3"], indirect=True)
def test_an_outage_is_said_in_one_sentence_and_its_end_in_another(
    store: Store, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults.plan.append("slow down")
    store.get("key")
    assert not outage_records(caplog)  # too short to speak of
    monkeypatch.setattr("data_service.store.retries.ANNOUNCED_OUTAGE_S", 0.0)
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


def test_patience_is_set_by_the_environment(store: Store, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKFLEET_STORE_PATIENCE_S", "0.4")
    faults.always = "error 500"
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        open_store(store.uri).get("key")
    assert time.monotonic() - began < 20


@pytest.mark.long
def test_requests_that_are_made_again_are_counted(store: Store, faults: FaultProxy) -> None:
    before = total_retries()
    store.get("key")
    assert total_retries() == before
    faults.plan.extend(["slow down"] * 5)  # more than a library may try by itself
    store.get("key")
    assert not faults.plan
    assert total_retries() > before
