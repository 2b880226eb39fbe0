"""One rank of each node examines it; all ranks hear the same and agree on who is unfit."""

import re
from pathlib import Path

import pytest

from launcher.runtime.preflight.collective import NodeReport, add_version_findings, warning_lines
from launcher.runtime.preflight.findings import Finding
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.measures import hold

pytestmark = pytest.mark.cluster


def report(node: str, *findings: Finding, **versions: str) -> NodeReport:
    return NodeReport(node, f"host-{node}", 0.1, findings, versions)


@pytest.mark.long
def test_every_node_is_examined_once_and_all_ranks_hear_of_it(fresh_run: str) -> None:
    heard = run_ranks(hold, 3, fresh_run, None)
    assert heard[0] == heard[1] == heard[2]
    assert heard[0]["nodes"] == ["first", "second"]
    assert heard[0]["unfit"] == []
    assert heard[0]["seconds"] < 3
    for checks in heard[0]["checks"]:
        assert checks.keys() >= {"memory", "run's store", "network"}
    assert heard[0]["event"]["node"] == "first"


def test_a_node_alone_has_no_network_to_measure(fresh_run: str) -> None:
    (heard,) = run_ranks(hold, 1, fresh_run, None)
    assert "network" not in heard["checks"][0]


@pytest.mark.long
def test_all_ranks_agree_on_the_unfit_node(fresh_run: str, tmp_path: Path) -> None:
    heard = run_ranks(hold, 3, fresh_run, str(tmp_path / "not-there"))
    assert [ears["unfit"] for ears in heard] == [["second"]] * 3
    assert "node second" in heard[2]["problem"]
    assert "run.json" in heard[2]["problem"]


def test_other_code_on_a_node_makes_it_unfit() -> None:
    same = {"maskfleet": "0.1.0+aaaa"}
    odd = add_version_findings([report("a", **same), report("b", maskfleet="0.1.0+bbbb"), report("c", **same)])
    assert [r.verdict for r in odd] == ["ok", "failure", "ok"]


def test_what_many_nodes_warn_of_is_said_once() -> None:
    files = Finding("open files", "warning", "20,000", "raise it")
    lines = warning_lines([report("a", files), report("b", files), report("c")])
    (line,) = lines
    assert re.match(r"preflight, host-a, host-b: open files: 20,000\b", line)
