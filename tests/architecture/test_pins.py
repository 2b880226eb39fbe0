"""Which releases are admitted and which are pinned: no others than those that were tested."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TESTED = yaml.safe_load((ROOT / "tests/bench/tested.yaml").read_text("utf-8"))
LINES = (ROOT / "infra/constraints.txt").read_text("utf-8").splitlines()
PINS = {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in LINES)}
BOUNDED = ("torch", "deepspeed", "ray", "triton")


def requirements() -> Iterator[Requirement]:
    """All of pyproject.toml, but our own extras."""
    extras = PROJECT["optional-dependencies"].values()
    for line in (*PROJECT["dependencies"], *(line for extra in extras for line in extra)):
        requirement = Requirement(line)
        if requirement.name != PROJECT["name"]:
            yield requirement


def proven(name: str) -> list[Version]:
    """Triton's releases are those that came with torch's."""
    entries: list[dict[str, Any]] = TESTED["torch" if name == "triton" else name]
    return [Version(one["triton" if name == "triton" else "release"]) for one in entries]


def bound(name: str) -> Requirement:
    (found,) = (one for one in requirements() if one.name == name and not one.extras)
    return found


def test_every_dependency_is_pinned_within_its_bound() -> None:
    for requirement in requirements():
        assert PINS[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_each_package_is_pinned_once_in_the_order_of_names() -> None:
    names = [canonicalize_name(line.partition("==")[0]) for line in LINES]
    assert names == sorted(set(names))
    assert not any(version.local for version in PINS.values()), "a build's tag is one machine's"


@pytest.mark.parametrize("name", BOUNDED)
def test_what_was_tested_is_admitted_and_the_pin_was_tested(name: str) -> None:
    assert all(release in bound(name).specifier for release in proven(name))
    assert PINS[canonicalize_name(name)] in proven(name)


@pytest.mark.parametrize("name", BOUNDED)
def test_all_releases_of_a_tested_series_are_admitted_from_the_tested_one_on_and_no_others(name: str) -> None:
    tested, admitted = proven(name), bound(name).specifier
    for major, minor, patch in product(range(6), range(81), range(13)):
        release = Version(f"{major}.{minor}.{patch}")
        earlier = [one for one in tested if one.release[:2] == (major, minor) and one <= release]
        assert bool(earlier) == (release in admitted), release


def test_the_pinned_torch_requires_the_pinned_triton() -> None:
    (entry,) = (one for one in TESTED["torch"] if Version(one["release"]) == PINS[canonicalize_name("torch")])
    assert Version(entry["triton"]) == PINS[canonicalize_name("triton")]


def test_whatever_a_dependency_needs_is_pinned_and_installed() -> None:
    """An old pip passes over an extra whose name is written differently, and says so only in a warning."""
    unread, seen = [Requirement(f"{PROJECT['name']}[dev]")], set[tuple[str, str]]()
    while unread:
        requirement = unread.pop()
        name = canonicalize_name(requirement.name)
        distribution = metadata.distribution(name)
        if name != PROJECT["name"]:
            assert Version(Version(distribution.version).public) == PINS[name], requirement
        for extra in ("", *map(canonicalize_name, requirement.extras)):
            if (name, extra) not in seen:
                seen.add((name, extra))
                unread += needs(distribution, extra)
    assert set(map(canonicalize_name, BOUNDED)) <= {name for name, _ in seen}


def needs(distribution: metadata.Distribution, extra: str) -> Iterator[Requirement]:
    """What a distribution requires here, by itself ("") or for one of its extras."""
    for line in distribution.requires or ():
        requirement = Requirement(
            re.sub(r'(extra\s*==\s*)"([^"]*)"', lambda m: f'{m[1]}"{canonicalize_name(m[2])}"', line)
        )
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


@pytest.mark.parametrize("name", BOUNDED)
def test_these_tests_run_with_what_is_pinned(name: str) -> None:
    """A build's tag (2.13.0+cpu) apart."""
    assert Version(Version(metadata.version(name)).public) == PINS[canonicalize_name(name)]


def test_every_installation_takes_the_lock() -> None:
    """README's, the image's, and that of infra/quickstart and infra/test."""
    for name in ("README.md", "infra/Dockerfile", "infra/common.sh"):
        text = (ROOT / name).read_text("utf-8").replace("\\\n", " ")
        lines = re.findall(r"^.*\bpip install\b.*$", text, re.MULTILINE)
        assert lines
        assert all(re.search(r"(-c|--constraint) infra/constraints\.txt", line) for line in lines), name
