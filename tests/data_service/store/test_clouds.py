"""What only Google's and Azure's stores do: names, errors from the text of obstore's, processes that fork, progress."""

import os
import random
from pathlib import Path

import pytest

from data_service.store.base import Store
from data_service.store.errors import (
    AccessDenied,
    BadUri,
    CredentialsExpired,
    CredentialsMissing,
    KeyMissing,
    OutOfSpace,
    StoreError,
    StoreUnavailable,
)
from data_service.store.open import open_store
from tests.support.stores.gcs import FakeGcs

pytest.importorskip("obstore", reason="needs maskfleet[clouds]")

CLOUDS = pytest.mark.parametrize("any_store", ["gs", pytest.param("az", marks=pytest.mark.azurite)], indirect=True)
LETTERS = "abzAZ09 -_.~!#$%&'()*+,:;<=>?@[]^`{|}\"äß日本ü😀\u0301"


@pytest.mark.long
@CLOUDS
def test_odd_names_come_back_as_they_were(any_store: Store) -> None:
    draws = random.Random(1)
    keys = set[str]()
    while len(keys) < 40:
        parts = ("".join(draws.choices(LETTERS, k=draws.randint(1, 8))) for _ in range(draws.randint(1, 3)))
        key = "/".join(parts)
        if not any(part in (".", "..") or part.endswith(".") for part in key.split("/")):
            keys.add(key)
    for key in keys:
        any_store.put(key, key.encode())
    assert [entry.key for entry in any_store.list()] == sorted(keys)
    for key in keys:
        assert any_store.get(key) == key.encode()
        assert any_store.size(key) == len(key.encode())
        cut = draws.randint(0, len(key))
        found = [entry.key for entry in any_store.list(key[:cut])] if not key[:cut].endswith(" ") else None
        assert found in (None, sorted(one for one in keys if one.startswith(key[:cut])))
    any_store.delete_many(sorted(keys))
    assert list(any_store.list()) == []


@CLOUDS
@pytest.mark.parametrize("key", ["a\nb", "a\tb", "a\\b", "\x7f", "folder/\x01"])
def test_names_that_the_service_would_change_are_refused(any_store: Store, key: str) -> None:
    for operation in (any_store.get, any_store.size, any_store.delete, lambda key: any_store.put(key, b"")):
        with pytest.raises(BadUri):
            operation(key)


def test_a_name_that_ends_with_a_dot_is_refused_where_it_is_lost(gs: FakeGcs) -> None:
    open_store(f"gs://{gs.new_bucket()}").put("a./b", b"x")
    with pytest.raises(BadUri):
        open_store("az://container/x").put("a./b", b"x")


ANSWERS = [
    (503, "ServerBusy", "", StoreUnavailable),
    (429, "TooManyRequests", "", StoreUnavailable),
    (500, "InternalError", "", StoreUnavailable),
    (408, "RequestTimeout", "", StoreUnavailable),
    (409, "ContainerBeingDeleted", "", StoreUnavailable),
    (404, "ContainerNotFound", "", BadUri),
    (404, "NoSuchBucket", "", BadUri),
    (404, "NoSuchKey", "", KeyMissing),
    (403, "AuthorizationPermissionMismatch", "", AccessDenied),
    (403, "AccessDenied", "", AccessDenied),
    (403, "AuthenticationFailed", "", AccessDenied),
    (403, "AuthenticationFailed", "Signature not valid in the specified time frame", CredentialsExpired),
    (401, "InvalidAuthenticationInfo", "Lifetime validation failed. The token is expired.", CredentialsExpired),
    (507, "InsufficientStorage", "", OutOfSpace),
    (413, "QuotaExceeded", "", OutOfSpace),
    (404, "NoSuchUpload", "", StoreUnavailable),
    (400, "InvalidBlockList", "", StoreUnavailable),
    (400, "InvalidHeaderValue", "", StoreError),
    (501, "NotImplemented", "", StoreError),
]  # fmt: skip


@pytest.mark.parametrize(("status", "code", "message", "kind"), ANSWERS)
@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_an_answer_has_its_kind_of_error(
    scheme: str, status: int, code: str, message: str, kind: type[StoreError]
) -> None:
    from obstore.exceptions import GenericError

    from data_service.store.cloud_errors import translate_error

    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    error = GenericError(
        f"Generic X error: Error performing GET http://host/b/a?sig=hidden in 2ms - "
        f"Server returned non-2xx status code: {status} Some Words: {body}\n\nDebug source:\nGeneric {{}}"
    )
    ours = translate_error(error, f"{scheme}://bucket/a", had_valid_credentials=False)
    assert type(ours) is kind
    assert f"{scheme}://bucket" in ours.problem
    assert "hidden" not in str(ours)
    assert "AWS" not in str(ours)


def test_after_valid_ones_wrong_credentials_count_as_expired() -> None:
    from obstore.exceptions import UnauthenticatedError

    from data_service.store.cloud_errors import translate_error

    for kind, valid_before in ((CredentialsExpired, True), (AccessDenied, False)):
        error = UnauthenticatedError("x - Server returned non-2xx status code: 401 Unauthorized: ")
        assert type(translate_error(error, "gs://bucket/a", had_valid_credentials=valid_before)) is kind


def test_an_account_that_is_not_named_and_a_key_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(BadUri, match="az://container/x/key") as caught:
        open_store("az://container/x", patience_s=600).get("key")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in caught.value.remedy
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "no key!")
    with pytest.raises(AccessDenied, match="AZURE_STORAGE_ACCOUNT_KEY"):
        open_store("az://container/x", patience_s=600).get("key")


def test_a_file_of_credentials_that_is_missing_is_named(
    gs: FakeGcs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gs.take_away(monkeypatch)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "none.json"))
    with pytest.raises((CredentialsMissing, CredentialsExpired), match=r"none\.json"):
        open_store(f"gs://{gs.new_bucket()}", patience_s=0.2).get("key")


def test_a_forked_process_is_told_what_to_do(gs: FakeGcs) -> None:
    store = open_store(f"gs://{gs.new_bucket()}")
    store.put("key", b"x")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.get("key")
        except StoreError as error:
            os.write(writer, f"{type(error).__name__}: {error.remedy}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert "forkserver" in told.read()
    assert store.get("key") == b"x"


@pytest.mark.long
def test_progress_is_never_ahead_of_the_server(gs: FakeGcs) -> None:
    bucket = gs.new_bucket()
    told: list[tuple[int, int]] = []

    def sent(count: int) -> None:
        uploads = gs.buckets[bucket].uploads.values()
        there = sum(len(part) for parts in uploads for part in list(parts.values()))
        told.append((count, there or len(gs.buckets[bucket].objects["large"].data)))

    open_store(f"gs://{bucket}").put_buffers("large", [memoryview(bytes(60 << 20))], sent)
    assert len(told) > 2
    assert all(count <= there for count, there in told)
    assert told[-1][0] == 60 << 20
