"""The ledger of long tests: what passed is in it, and what has changed since is run again."""

import ast
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.checks.long_tests import Changes, LongTests, Passed, read, stale, write
from tests.support.checks.pure import ROOT

pytest_plugins = "pytester"
TESTS = """
import pytest

@pytest.mark.long
@pytest.mark.parametrize("case", [1, 2])
def test_passes(case): pass

@pytest.mark.long
@pytest.mark.parametrize("case", [1, 2])
def test_fails_once(case): assert case == 1

def test_is_short(): pass
"""
BEFORE = Passed("0123456789ab", "2020-01-01", 1, 1)


def test_what_passed_is_kept_and_what_failed_is_as_before(pytester: pytest.Pytester, tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    ledger = tmp_path / "ledger.tsv"
    write(ledger, {"test_a.py::test_fails_once": BEFORE, "test_b.py::test_another": BEFORE})
    pytester.makepyfile(test_a=TESTS)
    done = pytester.runpytest_inprocess(plugins=[LongTests(None, ledger)])
    done.assert_outcomes(passed=4, failed=1)
    found = read(ledger)
    passed = found.pop("test_a.py::test_passes")
    assert (passed.cases, len(passed.commit.rstrip("+"))) == (2, 12)
    assert found == {"test_a.py::test_fails_once": BEFORE, "test_b.py::test_another": BEFORE}


class Changed(Changes):
    """Since the commit "old", one file."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _since(self, commit: str) -> frozenset[str] | None:  # type: ignore[override]
        return {"old": frozenset({self.name}), "new": frozenset()}.get(commit)


ALONE, COMMAND = "tests/launcher/after/finetune/test_encode.py::test_a", "tests/cluster/test_home.py::test_b"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            "launcher/after/finetune/encode.py",
            [COMMAND, ALONE],
        ),  # the one imports it; the other's processes may
        ("launcher/after/finetune/answers.py", [COMMAND, ALONE]),
        ("data_service/stream/plan.py", [COMMAND]),
        ("tests/launcher/after/finetune/test_encode.py", [ALONE]),
        ("README.md", []),
    ],
)
def test_what_has_changed_makes_a_test_stale_the_oldest_first(changed: str, expected: list[str]) -> None:
    known = {ALONE: Passed("old+", "2026-02-02", 1, 1), COMMAND: Passed("old", "2026-01-01", 1, 1)}
    assert list(stale(known, known, Changed(changed))) == expected


def test_what_never_passed_or_passed_at_an_unknown_commit_is_stale() -> None:
    known = {ALONE: Passed("gone", "2026-02-02", 1, 1), COMMAND: Passed("new", "2026-01-01", 1, 1)}
    never = "tests/cluster/test_growth.py::test_c"
    assert list(stale([*known, never], known, Changed("-"))) == [never, ALONE]


def test_the_ledger_holds_only_tests_that_are_there() -> None:
    for test in read(ROOT / "tests/long_tests.tsv"):
        file, _, name = test.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (ROOT / file).read_text("utf-8"), test


def test_tests_that_take_turns_are_there() -> None:
    listed = (ROOT / "tests/in_turn.txt").read_text("utf-8").splitlines()
    assert listed == sorted(set(listed))
    for file, names in groupby(listed, lambda line: line.partition("::")[0]):
        there = {
            node.name
            for node in ast.parse((ROOT / file).read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef)
        }
        assert {name.partition("::")[2] for name in names} <= there, file
