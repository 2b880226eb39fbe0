"""CHANGELOG.md is in the form of Keep a Changelog, and its newest version is the project's."""

import re
import tomllib
from datetime import date
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text("utf-8")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
VERSIONS = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", TEXT, re.MULTILINE)


def test_versions_go_down_and_so_do_their_dates() -> None:
    headings = re.findall(r"^## (?!\[Unreleased\]).*$", TEXT, re.MULTILINE)
    assert len(headings) == len(VERSIONS)
    versions = [Version(version) for version, _ in VERSIONS]
    dates = [date.fromisoformat(day) for _, day in VERSIONS]
    assert versions == sorted(set(versions), reverse=True)
    assert dates == sorted(dates, reverse=True)


def test_changes_are_of_the_known_kinds() -> None:
    for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.+)$", part, re.MULTILINE)
        assert kinds
        assert set(kinds) <= KINDS
        assert len(kinds) == len(set(kinds))


def test_the_newest_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert VERSIONS[0][0] == project["version"]
