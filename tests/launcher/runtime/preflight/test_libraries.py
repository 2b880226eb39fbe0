"""What a rank's imports take and read, measured in a fresh process."""

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launcher.runtime.preflight.doctor import (
    IMPORTED_MODULES,
    SLOW_IMPORTS_S,
    ImportTimes,
    examine_imports,
    file_system_kind,
    judge_imports,
    measure_imports,
)

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
