"""What README's line installs on GPU machines, asked of the package index: it resolves, and takes what was tested."""

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import wheels
import yaml
from packaging.requirements import Requirement
from program import BenchError
from wheels import MACHINES, PYTHONS, Place

TESTED = {one["release"]: one["triton"] for one in yaml.safe_load(wheels.TESTED.read_text("utf-8"))["torch"]}
VERSION = tomllib.loads((wheels.ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
PLACES = [Place(python, machine) for machine in MACHINES for python in PYTHONS]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """See `wheels.sources`. CI has an index."""
    if (reason := wheels.unreachable()) is not None:
        assert os.environ.get("CI") != "true", reason
        pytest.skip(f"the package index does not answer: {reason}")
    with wheels.sources() as folder:
        yield folder


def test_the_line_and_its_places() -> None:
    assert wheels.readme_line() == ["-c", "infra/constraints.txt", "."]
    (cluster,) = (Requirement(f"x{part[1:]}") for part in wheels.dockerfile_line() if part.startswith("."))
    assert "cluster" in cluster.extras


@pytest.mark.long
@pytest.mark.parametrize("python", PYTHONS)
def test_readmes_line_takes_the_lock_and_cudas_wheels(folder: Path, python: str) -> None:
    found = wheels.resolve(Place(python, "x86_64"), wheels.readme_line(), folder)
    assert_locked(found.versions)
    assert {"nvidia-nccl-cu13", "nvidia-cudnn-cu13", "cuda-toolkit", "triton"} <= found.versions.keys()
    torch = found.versions["torch"]
    assert found.versions["triton"] == TESTED[torch]
    assert_triton_fits(found)


def assert_triton_fits(found: wheels.Resolved) -> None:
    required = wheels.required(found, "triton", by="torch")
    assert required is not None
    assert TESTED[found.versions["torch"]] in required


def assert_locked(versions: Mapping[str, str]) -> None:
    pins = wheels.pins()
    assert {name: version for name, version in versions.items() if pins.get(name) != version} == {"maskfleet": VERSION}


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.python}-{place.machine}")
@pytest.mark.parametrize("extras", ["image", "dev"])
def test_extras_take_the_lock(folder: Path, place: Place, extras: str) -> None:
    """The image's line, and what infra/test installs."""
    line = wheels.dockerfile_line() if extras == "image" else ["-c", "infra/constraints.txt", ".[dev]"]
    assert_locked(wheels.resolve(place, line, folder).versions)


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.python}-{place.machine}")
@pytest.mark.parametrize("torch", TESTED)
def test_each_admitted_torch_requires_the_triton_on_record(folder: Path, place: Place, torch: str) -> None:
    assert_triton_fits(wheels.resolve(place, ["--no-deps", f"torch==={torch}"], folder))


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.python}-{place.machine}")
@pytest.mark.parametrize("torch", TESTED)
def test_readmes_line_resolves_with_each_admitted_torch(folder: Path, place: Place, torch: str) -> None:
    """And with the Triton on record, if nothing else of the lock changes."""
    lock = wheels.lock(torch)
    (folder / "other.txt").write_text("".join(f"{name}=={version}\n" for name, version in lock.items()))
    found = wheels.resolve(place, ["-c", "other.txt", "."], folder)
    apart = {name for name, version in found.versions.items() if lock.get(name) != version} - {"maskfleet"}
    assert all(name.startswith(wheels.CUDAS) for name in apart)
    assert found.versions["triton"] == TESTED[torch]


@pytest.mark.long
def test_another_triton_than_torchs_is_found_out(folder: Path) -> None:
    """As the lock had one, 3.9.0."""
    lock = (folder / "infra/constraints.txt").read_text("utf-8")
    pin = f"triton=={wheels.pins()['triton']}"
    assert pin in lock
    (folder / "other.txt").write_text(lock.replace(pin, "triton==3.9.0"))
    with pytest.raises(BenchError, match="ResolutionImpossible"):
        wheels.resolve(PLACES[0], ["-c", "other.txt", "."], folder)


@pytest.mark.long
def test_markers_are_those_of_the_place(folder: Path) -> None:
    """pip evaluates them with the Python that runs it."""
    place = Place("3.13", "aarch64")
    yes = 'deepspeed; python_version == "3.13" and platform_machine == "aarch64"'
    no = 'jieba; python_version < "3.13" or platform_machine == "x86_64"'
    assert wheels.resolve(place, ["--no-deps", "--no-index", yes, no], folder).versions.keys() == {"deepspeed"}


@pytest.mark.long
def test_the_guides_table_is_what_is_found(folder: Path) -> None:
    assert wheels.table() == wheels.written()
