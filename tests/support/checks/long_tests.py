"""When each long test passed last: `tests/long_tests.tsv` says at which commit, on which day, in how many seconds and
with how many cases. Every run of long tests keeps it, and `--stale MINUTES` runs those whose code has changed since.
"""

import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest

from tests.support.checks.pure import ROOT, reached, starts_processes

LEDGER = ROOT / "tests/long_tests.tsv"
PACKAGES = ("checkpoints/", "data_service/", "encoder_core/", "launcher/")
_DIRTY = "+"  # after the commit: the files were not quite those of it
_HEADER = "test\tcommit\tday\tseconds\tcases\n"


@dataclass(frozen=True)
class Passed:
    """The last time that a test passed. `seconds`: of all its cases that were chosen, `cases` of them."""

    commit: str
    day: str
    seconds: float
    cases: int


def read(ledger: Path) -> dict[str, Passed]:
    """By test, without its cases' names."""
    if not ledger.is_file():
        return {}
    rows = (line.split("\t") for line in ledger.read_text("utf-8").splitlines()[1:])
    return {
        test: Passed(commit, day, float(seconds), int(cases)) for test, commit, day, seconds, cases in rows
    }


def write(ledger: Path, known: Mapping[str, Passed]) -> None:
    """Sorted, so that two commits' ledgers merge."""
    lines = (
        f"{test}\t{one.commit}\t{one.day}\t{one.seconds:.0f}\t{one.cases}\n"
        for test, one in sorted(known.items())
    )
    ledger.write_text(_HEADER + "".join(lines), "utf-8")


def stale(tests: Iterable[str], known: Mapping[str, Passed], changed: "Changes") -> Iterator[str]:
    """Those that never passed, then those whose code has changed since, the longest ago first."""
    for test in sorted(tests, key=lambda test: known[test].day if test in known else ""):
        file = ROOT / test.partition("::")[0]
        if test not in known or changed.touch(file, known[test].commit):
            yield test


class Changes:
    """What has changed between a commit and the files as they are."""

    def touch(self, file: Path, commit: str) -> bool:
        """Whether it is in what the test file imports; in any package of ours, if the test starts processes."""
        names = self._since(commit.removesuffix(_DIRTY))
        if names is None:
            return True
        used = {str(path.relative_to(ROOT)) for path in reached(file)}
        return bool(names & used) or (
            starts_processes(file) and any(name.startswith(PACKAGES) for name in names)
        )

    @cache  # noqa: B019 - one object lives as long as the tests
    def _since(self, commit: str) -> frozenset[str] | None:
        """None: this repository does not know the commit."""
        found = _git("diff", "--name-only", commit)
        return None if found is None else frozenset(found.splitlines())


class LongTests:
    """A plugin of pytest. `minutes`: if given, only stale tests run, and none begins after so long."""

    def __init__(self, minutes: float | None, ledger: Path = LEDGER) -> None:
        self._minutes, self._ledger, self._began = minutes, ledger, time.monotonic()
        self._seconds, self._cases = defaultdict[str, float](float), defaultdict[str, int](int)
        self._failed = set[str]()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._minutes is None:
            return
        of = defaultdict[str, list[pytest.Item]](list)
        for item in items:
            if item.get_closest_marker("long") is not None:
                of[_test(item.nodeid)].append(item)
        chosen = [item for test in stale(of, read(self._ledger), Changes()) for item in of[test]]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        done = yield
        if self._minutes is not None and time.monotonic() - self._began > 60 * self._minutes:
            item.session.shouldstop = f"{self._minutes:g} minutes are over"
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "long" not in report.keywords:
            return
        test = _test(report.nodeid)
        if report.failed:
            self._failed.add(test)
        if report.when == "call" and report.passed:
            self._seconds[test] += report.duration
            self._cases[test] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A test of which a case failed stays as it is there; so does all where there is no git."""
        commit = None if hasattr(session.config, "workerinput") else _commit()
        passed = self._cases.keys() - self._failed
        if commit is None or not passed:
            return
        day = datetime.now(UTC).date().isoformat()
        new = {test: Passed(commit, day, self._seconds[test], self._cases[test]) for test in passed}
        write(self._ledger, read(self._ledger) | new)


def _test(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _commit() -> str | None:
    found = _git("rev-parse", "--short=12", "HEAD")
    dirty = _git("status", "--porcelain", "--untracked-files=no", "--", *PACKAGES)
    return None if found is None else found.strip() + (_DIRTY if dirty else "")


def _git(*words: str) -> str | None:
    try:
        found = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return found.stdout if found.returncode == 0 else None
