"""Many deletions cost few requests, whatever the server says to them."""

import pytest

from data_service.store import s3 as s3_store
from data_service.store.errors import AccessDenied
from data_service.store.open import open_store
from data_service.store.s3 import S3Store
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server

KEYS = [f"a/{number}" for number in range(25)]

_REFUSED = b"<DeleteResult><Error><Key>some/a/7</Key><Code>%s</Code><Message>no</Message></Error></DeleteResult>"


@pytest.fixture
def store(s3: S3Server, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    monkeypatch.setattr(s3_store, "MAX_DELETIONS", 10)
    store = open_store(f"s3://{s3.new_bucket()}/some", patience_s=20)
    assert isinstance(store, S3Store)
    for key in (*KEYS, "b"):
        store.put(key, b"")
    faults.requests.clear()
    return store


def answer(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.long
def test_a_batch_is_one_request(store: S3Store, faults: FaultProxy) -> None:
    store.delete_many(KEYS)
    assert [method for method, _, _ in faults.requests] == ["POST"] * 3
    assert [entry.key for entry in store.list()] == ["b"]


@pytest.mark.long
def test_a_batch_that_fails_is_sent_again(store: S3Store, faults: FaultProxy) -> None:
    faults.plan.extend(["slow down", "reset", "reset after"])
    store.delete_many(KEYS)
    assert [entry.key for entry in store.list()] == ["b"]


@pytest.mark.long
def test_what_the_server_did_not_delete_is_asked_for_again(store: S3Store, faults: FaultProxy) -> None:
    answers = iter([answer("200 OK", _REFUSED % b"InternalError")])
    faults.mangle = lambda method, whole: next(answers, None) if method == "POST" else None
    store.delete_many(KEYS[:10])
    assert len(faults.requests) == 2


@pytest.mark.long
def test_a_refusal_of_one_is_an_error_at_once(store: S3Store, faults: FaultProxy) -> None:
    faults.mangle = lambda method, whole: answer("200 OK", _REFUSED % b"AccessDenied")
    with pytest.raises(AccessDenied, match=r"some/a/7: no"):
        store.delete_many(KEYS[:10])
    assert len(faults.requests) == 1


@pytest.mark.long
def test_a_server_without_this_request_is_asked_one_by_one(store: S3Store, faults: FaultProxy) -> None:
    refusal = answer("501 Not Implemented", b"<Error><Code>NotImplemented</Code><Message>no</Message></Error>")
    faults.mangle = lambda method, whole: refusal if method == "POST" else None
    store.delete_many(KEYS)
    methods = [method for method, _, _ in faults.requests]
    assert methods.count("DELETE") == 25
    assert [entry.key for entry in store.list()] == ["b"]
