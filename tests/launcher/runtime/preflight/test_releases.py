"""Which torch was tested, which Triton fits it, and what another torch than before means: one line that names both."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from launcher.runtime.preflight.releases import (
    BIT_EQUAL_SERIES,
    describe_torch_change,
    triton_problem,
    untested_torch_warning,
)

PROJECT = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text("utf-8"))["project"]
GUIDE = Path(__file__).parents[4] / "infra/docs/operating.md"
(ADMITTED,) = (one for one in map(Requirement, PROJECT["dependencies"]) if one.name == "torch")
RELEASES = st.tuples(st.integers(1, 3), st.integers(0, 20), st.integers(0, 4)).map(lambda x: ".".join(map(str, x)))
NEAR = st.tuples(st.just(2), st.integers(10, 17), st.integers(0, 2)).map(lambda x: ".".join(map(str, x)))
TAGS = st.sampled_from(["", "+cpu", "+cu130", "+rocm7.1"])


def install(folder: Path, name: str, version: str, *requires: str) -> None:
    """Metadata as pip leaves it, before that of this environment."""
    for old in folder.glob(f"{name}-*"):
        (old / "METADATA").unlink()
        old.rmdir()
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir()
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    (place / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {one}" for one in requires), "", ""]))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(autouse=True)
def found_first(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(packages)


@given(release=RELEASES | NEAR, tag=TAGS)
def test_a_torch_of_no_tested_series_is_named_beside_those_that_were(packages: Path, release: str, tag: str) -> None:
    install(packages, "maskfleet", "0.3.0", str(ADMITTED))
    install(packages, "torch", release + tag)
    line = untested_torch_warning()
    assert (line == "") == (release in ADMITTED.specifier)
    assert line == "" or (f"torch {release}{tag} " in line and str(ADMITTED.specifier) in line)


LINUX = "; platform_system == 'Linux' and python_version < '3.16'"


@pytest.mark.parametrize("needed", ["triton==3.7.1", "triton~=3.9.0", None])
@given(seen=st.tuples(st.just(3), st.integers(5, 10), st.integers(0, 3)).map(lambda x: ".".join(map(str, x))))
def test_a_triton_that_torch_does_not_require_is_named_beside_what_it_requires(
    packages: Path, needed: str | None, seen: str
) -> None:
    """A build of torch for CPUs requires none, and what it requires on Windows is not asked for here."""
    windows = "triton==1.0; platform_system == 'Windows'"
    install(packages, "torch", "2.15.0", windows, *([needed + LINUX] if needed else []))
    install(packages, "triton", seen)
    line = triton_problem()
    assert (line == "") == (needed is None or seen in Requirement(needed).specifier)
    assert line == "" or all(part in line for part in ("torch 2.15.0", str(needed), f"Triton {seen}", "Python"))


@given(before=NEAR, now=NEAR, tags=st.tuples(TAGS, TAGS))
def test_another_release_is_said_and_another_build_is_not(before: str, now: str, tags: tuple[str, str]) -> None:
    line = describe_torch_change(before + tags[0], now + tags[1])
    assert (line == "") == (before == now)
    assert line == "" or (f"torch {before} " in line and f"torch {now} " in line)
    assert describe_torch_change("", now) == describe_torch_change(before, "") == ""


def test_it_says_equal_of_the_releases_that_are_equal_in_the_guides_table() -> None:
    """Of every run whose layers Python computes."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in GUIDE.read_text("utf-8").partition("## Another torch")[2].partition("\n## ")[0].splitlines()
        if line.startswith("| ")
    ]
    head, python = rows[0], [row for row in rows if row[1] == "Python"]
    assert len(python) >= 8
    columns = {name.removeprefix("torch ").partition("+")[0]: number for number, name in enumerate(head) if number > 1}
    equal = [release for release, number in columns.items() if {row[number] for row in python} == {"equal"}]
    assert {release.rpartition(".")[0] for release in equal} == BIT_EQUAL_SERIES
    assert all(
        ("same bits" in describe_torch_change(equal[0], other)) == (other in equal) for other in [*equal[1:], "2.10.0"]
    )
