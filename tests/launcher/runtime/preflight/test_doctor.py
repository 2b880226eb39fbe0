"""The doctor: this machine passes, and a store that misbehaves is found out."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_service.store.base import Store
from data_service.store.local import LocalStore
from launcher.runtime.preflight import doctor
from launcher.runtime.preflight.doctor import examine_machine, probe_store


@pytest.mark.long
def test_this_machine_can_train() -> None:
    findings = list(examine_machine([]))
    assert {finding.what for finding in findings} >= {
        "Python",
        "torch",
        "cores",
        "memory",
        "/dev/shm",
        "ports",
    }
    assert [finding for finding in findings if finding.verdict == "failure"] == []
    assert all(finding.remedy for finding in findings if finding.verdict != "ok")


def test_a_good_store_passes_and_is_left_as_it_was(any_store: Store) -> None:
    (finding,) = probe_store(any_store.uri)
    assert finding.verdict == "ok", finding.found
    assert list(any_store.list()) == []


@pytest.mark.parametrize("uri", ["ftp://host/x", "s3://", ""])
def test_a_uri_that_is_none_fails(uri: str) -> None:
    (finding,) = probe_store(uri)
    assert finding.verdict == "failure"
    assert finding.remedy


def test_a_file_where_the_folder_should_be_fails(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch(stat.S_IRUSR)
    (finding,) = probe_store(str(blocked / "run"))
    assert finding.verdict == "failure"


class Careless(LocalStore):
    """A store whose conditional put replaces what is there, as some S3 servers' does."""

    def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
        self.put(key, data)
        return True


class Forgetful(LocalStore):
    """A store whose listings lag behind."""

    def list(self, prefix: str = "") -> Iterator[object]:  # type: ignore[override]
        return iter(())


@pytest.mark.parametrize(("kind", "found"), [(Careless, "conditional put"), (Forgetful, "listing")])
def test_a_store_that_would_lose_runs_is_found_out(
    kind: type[LocalStore], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "open_store", lambda uri, patience_s: kind(Path(uri)))
    (finding,) = probe_store(str(tmp_path))
    assert finding.verdict == "failure"
    assert found in finding.found
    assert list(LocalStore(tmp_path).list()) == []


@pytest.mark.long
def test_another_version_than_the_pinned_one_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text("torch==1.0\nnumpy==1.0\n")
    monkeypatch.setattr(doctor, "_PINS", pins)
    found = {finding.what: finding for finding in examine_machine([])}
    assert found["numpy"].verdict == "warning"
    assert "tested with 1.0" in found["numpy"].found
    assert found["torch"].verdict == "ok", "torch is compared with all that were tested"
