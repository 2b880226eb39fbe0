"""URIs, and what is said about wrong ones."""

import sys
from pathlib import Path

import pytest

from data_service.store.errors import BadUri, StoreError
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from data_service.store.s3 import S3Store


def test_paths_and_file_uris_open_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("runs/a") == LocalStore(tmp_path / "runs/a")
    assert open_store(tmp_path) == LocalStore(tmp_path)
    assert open_store(f"file://{tmp_path}/with%20space") == LocalStore(tmp_path / "with space")
    assert open_store(open_store("runs/a").uri) == LocalStore(tmp_path / "runs/a")


def test_s3_uris_open_a_bucket_and_a_prefix() -> None:
    assert open_store("s3://bucket/some/prefix/") == S3Store("bucket", "some/prefix")
    assert open_store("S3://bucket/odd#key?") == S3Store("bucket", "odd#key?")
    assert open_store("s3://bucket").uri == "s3://bucket"


def test_uris_of_other_clouds_open_a_bucket_and_a_prefix() -> None:
    pytest.importorskip("obstore", reason="needs maskfleet[clouds]")
    assert open_store("gs://bucket/some/prefix/").uri == "gs://bucket/some/prefix"
    assert open_store("AZ://container/odd#key?").uri == "az://container/odd#key?"
    assert open_store("gs://bucket/x") == open_store("gs://bucket/").with_prefix("x")
    assert open_store("gs://bucket/x") != open_store("az://bucket/x")


def test_a_scheme_whose_library_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "data_service.store.cloud", None)
    with pytest.raises(StoreError, match="gs://bucket/x") as caught:
        open_store("gs://bucket/x")
    assert "clouds" in caught.value.remedy


@pytest.mark.parametrize(
    "uri", ["", "s3://", "s3:///key", "gs://", "az:///key", "gcs://bucket/x", "file://host/folder", "file://"]
)
def test_wrong_uris_say_so(uri: str) -> None:
    with pytest.raises(BadUri) as caught:
        open_store(uri)
    assert repr(uri) in caught.value.problem
