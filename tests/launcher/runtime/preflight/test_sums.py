"""The first sums of a group: a rank or a link that is wrong or slow is named, whichever it is; nobody else is."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.runtime.preflight.collective import NodeReport, add_sum_findings
from launcher.runtime.preflight.findings import RankSums, WrongNumbers, judge_sums
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.measures import faulty_sums

WRONG = WrongNumbers(3, 17, "5.0", 4.0)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_fault_that_was_drawn_is_named_with_its_place(world: int) -> None:
    heard = run_ranks(faulty_sums, world, world, 12)
    assert all(ears == heard[0] for ears in heard), "all ranks agree"
    for example in heard[0]:
        ensure_named(example, world)


def ensure_named(example: dict[str, Any], world: int) -> None:
    rank, place, bad = example["rank"], f"{example['number']:,}", example["bad"]
    failures = {node: text for (node, verdict, _), text in bad.items() if verdict == "failure"}
    next_rank, nodes = (rank + 1) % world, "abcd"[:world]
    match example["kind"]:
        case "makes" | "hears":
            assert set(failures) == {nodes[rank]}, example
            assert f"rank {rank}" in failures[nodes[rank]]
            assert f"1 wrong; number {place} " in failures[nodes[rank]]
        case "sends":
            assert set(failures) == {nodes[rank], nodes[next_rank]}, example
            assert all(f"rank {rank} ({nodes[rank]})" in text for text in failures.values())
            assert all(f"number {place} is" in text for text in failures.values())
        case "gives":
            assert set(failures) == set(nodes), "the sum is wrong alike for all, and nobody can tell who it was"
        case "delays":
            assert not failures
            assert f"from rank {rank} ({nodes[rank]})" in bad[nodes[next_rank], "warning", "network"]
        case _:
            assert not failures


SPEEDS = st.floats(0.5e9, 1e9)


@given(world=st.integers(2, 12), node=st.integers(1, 4), data=st.data())
def test_a_slow_link_between_nodes_is_named_and_no_other(world: int, node: int, data: st.DataObject) -> None:
    """One in twenty of its neighbours' speed, and of what the hardware has: the pair is named."""
    nodes = [f"{rank // node:04d}" * 14 for rank in range(world)]
    crossing = [rank for rank in range(world) if nodes[rank - 1] != nodes[rank]]
    slow = data.draw(st.sampled_from(crossing)) if crossing else None
    speeds = [data.draw(SPEEDS) for _ in range(world)]
    found = [
        RankSums(None, None, None, None, speed / (20 if rank == slow else 1), 1e9, 1e9, 1e9)
        for rank, speed in enumerate(speeds)
    ]
    reports = [NodeReport(name, f"host-{name[:4]}", 0.1, (), {}) for name in dict.fromkeys(nodes)]
    told = add_sum_findings(reports, found, nodes)
    bad = [(report.node, f) for report in told for f in report.findings if f.verdict != "ok"]
    assert [(at, f.what) for at, f in bad] == ([] if slow is None else [(nodes[slow], "network")])
    for _, finding in bad:
        assert slow is not None
        ends = [(rank, nodes[rank][:8], f"host-{nodes[rank][:4]}") for rank in ((slow - 1) % world, slow)]
        named = re.findall(r"rank (\d+) \(node (\w+), ([\w-]+)\)", finding.found)
        assert named == [(str(rank), name, host) for rank, name, host in ends]
        assert finding.remedy


def test_a_slow_link_inside_a_node_counts_where_the_hardware_is_known() -> None:
    """Ranks on CPUs have no links inside a node: how fast a message is there says how busy its cores are."""
    speeds = (200e9, 190e9, 20e9, 210e9)
    h100 = [RankSums(None, None, None, None, speed, 1e11, 450e9) for speed in speeds]
    (bad,) = [f for f in judge_sums(h100, ["a"] * 4)["a"] if f.verdict != "ok"]
    assert bad.what == "links"
    assert "rank 1 to rank 2" in bad.found
    cpus = [RankSums(None, None, None, None, speed / 100, 1e9) for speed in speeds]
    assert {f.verdict for f in judge_sums(cpus, ["a"] * 4)["a"]} == {"ok"}


def test_who_adds_wrongly_is_blamed_and_not_who_was_given_the_sum() -> None:
    victim, adder = RankSums(None, None, None, WRONG), RankSums(None, None, WRONG, WRONG)
    told = judge_sums([victim, adder, victim], ["a", "b", "a"])
    assert [f.verdict for f in told["a"]] == ["ok"]
    assert [f.verdict for f in told["b"]] == ["failure"]
    assert "rank 1" in told["b"][0].found


def test_wrong_numbers_of_a_rank_are_not_its_links_fault() -> None:
    told = judge_sums(
        [RankSums(WRONG, None, None, WRONG), RankSums(None, WRONG, None, WRONG)],
        ["a", "b"],
    )
    assert [[f.verdict for f in told[node]] for node in "ab"] == [["failure"], ["ok"]]
