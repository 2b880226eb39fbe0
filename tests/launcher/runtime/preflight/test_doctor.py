"""The doctor: this machine passes, a store that misbehaves is found out, and what a rank's imports take and read is
measured in a fresh process."""

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from data_service.store.base import Store
from data_service.store.local import LocalStore
from launcher.runtime.preflight import doctor
from launcher.runtime.preflight.doctor import (
    IMPORTED_MODULES,
    SLOW_IMPORTS_S,
    ImportTimes,
    examine_imports,
    examine_machine,
    file_system_kind,
    judge_imports,
    measure_imports,
    probe_store,
)


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


SIZE = 3_000_000


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of 40 modules, one of which takes 0.2 s and opens a file of `SIZE` bytes."""
    package = tmp_path / "made_up"
    package.mkdir()
    (package / "__init__.py").write_text("".join(f"from made_up import m{n}\n" for n in range(40)))
    for number in range(40):
        (package / f"m{number}.py").write_text(f"VALUE = {number}\n")
    (package / "table").write_bytes(bytes(SIZE))
    slow = f"import time\ntime.sleep(0.2)\nopen({str(package / 'table')!r}, 'rb').read()\n"
    (package / "m7.py").write_text(slow)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return package.name


def test_time_files_and_bytes_are_those_of_the_modules(made: str) -> None:
    nothing, found = measure_imports({}), measure_imports({"all": made, "again": "made_up.m3"})
    assert list(found.seconds) == ["all", "again"]
    assert 0.2 <= found.seconds["all"] < found.total_s
    assert found.seconds["again"] < 0.1, "it is loaded already"
    assert found.files - nothing.files >= 42
    assert SIZE <= found.size - nothing.size < 2 * SIZE


def test_what_a_rank_cannot_import_is_a_failure() -> None:
    finding = examine_imports({"one": "json", "another": "no_such_module"})
    assert (finding.verdict, finding.what) == ("failure", "imports")
    assert "no_such_module" in finding.found
    assert finding.remedy


def test_modules_without_bytecode_are_counted(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may write it, as in an image whose packages were not compiled."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    nothing, first = measure_imports({}), measure_imports({"all": made})
    assert first.uncompiled - nothing.uncompiled == 41
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    assert measure_imports({"all": made}).uncompiled == nothing.uncompiled
    finding = judge_imports(replace(first, uncompiled=4000), "overlay")
    assert finding.verdict == "warning"
    assert "compileall" in finding.remedy
    assert "4,000" in finding.found


@pytest.mark.parametrize(("seconds", "verdict"), [(SLOW_IMPORTS_S - 1, "ok"), (SLOW_IMPORTS_S + 1, "warning")])
def test_slow_imports_have_a_remedy(seconds: float, verdict: str) -> None:
    parts = dict.fromkeys(IMPORTED_MODULES, seconds / len(IMPORTED_MODULES))
    finding = judge_imports(
        ImportTimes(parts, files=4321, size=1 << 30, read=1 << 20, uncompiled=0), "nfs4 (on the network)"
    )
    assert finding.verdict == verdict
    assert bool(finding.remedy) == (verdict == "warning")
    assert all(part in finding.found for part in ("4,321", "1.0 GiB", "1.0 MiB", "nfs4", "torch"))


def test_a_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    for path in (tmp_path, Path("/proc/self"), Path("/dev/shm"), Path("/")):
        real = Path(os.path.realpath(path))
        nearest = next(str(place) for place in (real, *real.parents) if str(place) in mounts)
        assert file_system_kind(path).split(" (")[0] == mounts[nearest]
