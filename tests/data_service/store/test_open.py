"""URIs, and what is said about wrong ones."""

from pathlib import Path

import pytest

from data_service.store.errors import BadUri
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


@pytest.mark.parametrize("uri", ["", "s3://", "s3:///key", "gs://bucket/x", "file://host/folder", "file://"])
def test_wrong_uris_say_so(uri: str) -> None:
    with pytest.raises(BadUri) as caught:
        open_store(uri)
    assert repr(uri) in caught.value.problem
