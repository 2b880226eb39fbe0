"""Answers broken anywhere and in any way: each operation gives the right result or a StoreError, and ends."""

import re
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_service.store.base import Entry, Store
from data_service.store.errors import StoreError, StoreUnavailable
from data_service.store.open import open_store
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.service import Service

DATA = bytes(range(251)) * 40
STATUSES = [
    200,
    204,
    206,
    301,
    304,
    307,
    400,
    401,
    403,
    404,
    408,
    409,
    411,
    412,
    416,
    429,
    500,
    501,
    503,
    507,
    999,
]
CODES = [
    "SlowDown",
    "InternalError",
    "AccessDenied",
    "InvalidAccessKeyId",
    "NoSuchKey",
    "InvalidRange",
    "Odd",
    "",
]

Mangle = Callable[[str, bytes], bytes | None]


def cut(part: float) -> Mangle:
    """The answer ends early. Of a HEAD nothing is sent then: that its last header is cut cannot be seen."""

    def mangle(method: str, whole: bytes) -> bytes:
        return whole[: 0 if method == "HEAD" else int(part * len(whole))]

    return mangle


def status(number: int) -> Mangle:
    """Another status, and the same body: but never success where there was none."""

    def mangle(method: str, whole: bytes) -> bytes | None:
        was = int(whole.split(b" ", 2)[1])
        return None if number < 300 <= was else whole.replace(b"%d" % was, b"%d" % number, 1)

    return mangle


def refusal(number: int, code: str) -> Mangle:
    body = f"<Error><Code>{code}</Code></Error>".encode()
    return lambda method, whole: b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (number, len(body)) + body


def garbage(data: bytes) -> Mangle:
    return lambda method, whole: data


def garbled_header(place: float, data: bytes) -> Mangle:
    """Bytes put in anywhere in the XML of a listing, or instead of the names of headers."""

    def mangle(method: str, whole: bytes) -> bytes | None:
        body = whole.index(b"\r\n\r\n") + 4
        if b"<ListBucketResult" in whole or b"<EnumerationResults" in whole:
            middle = body + int(place * (len(whole) - body))
            return whole[:middle] + b"\x00<" + data + whole[middle:]
        return None if method == "HEAD" else re.sub(rb"(?m)^(Content-|ETag|Last-)", b"X-", whole[:body]) + whole[body:]

    return mangle


BROKEN = st.one_of(
    st.floats(0, 1, exclude_max=True).map(cut),
    st.sampled_from(STATUSES).map(status),
    st.builds(refusal, st.sampled_from([s for s in STATUSES if s >= 300]), st.sampled_from(CODES)),
    st.binary(max_size=60).map(garbage),
    st.builds(garbled_header, st.floats(0, 1), st.binary(max_size=8)),
)

ENTRIES = [Entry("a/1", 1), Entry("a/2", 2), Entry("b/3", len(DATA))]


def put_and_look(store: Store, clean: Callable[[], None]) -> bool:
    store.put("new", b"x")
    clean()
    return store.get("new") == b"x"


OPERATIONS: dict[str, Callable[[Store, Callable[[], None]], bool]] = {
    "get": lambda store, clean: store.get("b/3") == DATA,
    "get_range": lambda store, clean: store.get_range("b/3", 100, 5000) == DATA[100:5100],
    "put": put_and_look,
    "put_if_absent": lambda store, clean: store.put_if_absent("a/1", b"y") is False,
    "size": lambda store, clean: store.size("b/3") in (len(DATA), None),
    "age": lambda store, clean: (age := store.age("b/3")) is None or age < 3600,
    "list": lambda store, clean: [e for e in store.list() if e.key != "new"] == ENTRIES,
    "folders": lambda store, clean: list(store.folders()) == ["a", "b"],
    "delete": lambda store, clean: store.delete("gone") is None,
    "clock": lambda store, clean: abs((store.clock() or time.time()) - time.time()) < 3600,
    "remove_leftovers": lambda store, clean: store.remove_leftovers("", older_than_key=None) == 0,
}


@pytest.fixture(scope="module")
def broken() -> deque[Mangle]:
    """What is done to the next answers, in turn."""
    return deque()


@pytest.fixture
def store(service: Service, faults: FaultProxy, broken: deque[Mangle], monkeypatch: pytest.MonkeyPatch) -> Store:
    hasty = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=lambda seconds: None)
    monkeypatch.setattr("data_service.store.retries.time", hasty)
    store = open_store(f"{service.scheme}://{service.new_bucket()}/x", patience_s=0.2)
    for key, size in (("a/1", 1), ("a/2", 2), ("b/3", len(DATA))):
        store.put(key, DATA[:size])
    faults.mangle = lambda method, whole: broken.popleft()(method, whole) if broken else None
    return store


@pytest.mark.long
@pytest.mark.parametrize("operation", OPERATIONS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mangles=st.lists(BROKEN, min_size=1, max_size=5))
def test_a_broken_answer_gives_the_result_or_a_store_error(
    store: Store, faults: FaultProxy, broken: deque[Mangle], operation: str, mangles: list[Mangle]
) -> None:
    faults.requests.clear()
    broken.extend(mangles)
    try:
        assert OPERATIONS[operation](store, broken.clear)
    except StoreError:
        pass
    finally:
        broken.clear()
    assert len(faults.requests) < 30


def xml(method: str, whole: bytes, change: Callable[[bytes], bytes]) -> bytes:
    head, _, body = whole.partition(b"\r\n\r\n")
    body = change(body)
    return re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head) + b"\r\n\r\n" + body


MORE = b"<IsTruncated>true</IsTruncated>"
ENDLESS: dict[str, Callable[[bytes], bytes]] = {
    "no contents": lambda body: re.sub(
        rb"<Contents>.*</Contents>|<CommonPrefixes>.*</CommonPrefixes>", b"", truncated(body), flags=re.S
    ),
    "the same again": lambda body: truncated(body),
    "the same token": lambda body: truncated(body).replace(
        b"</ListBucketResult>", b"<NextContinuationToken>x</NextContinuationToken></ListBucketResult>"
    ),
}


def truncated(body: bytes) -> bytes:
    return body.replace(b"<IsTruncated>false</IsTruncated>", MORE)


@pytest.mark.long
@pytest.mark.parametrize("service", ["s3"], indirect=True)
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("listing", ["list", "folders"])
def test_a_listing_that_does_not_go_on_ends(store: Store, faults: FaultProxy, kind: str, listing: str) -> None:
    faults.mangle = lambda method, whole: xml(method, whole, ENDLESS[kind])
    with pytest.raises(StoreUnavailable):
        list(store.list() if listing == "list" else store.folders())
    faults.mangle = None
    assert list(store.list()) == ENTRIES
