"""Nodes with several networks, and with names that are no address of theirs: ranks meet at the addresses by which Ray
knows their nodes. A network namespace is a node."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import netns
from tests.support.clusters.netns import Machine

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Machine]]:
    reason = netns.why_not()
    if reason is not None:
        pytest.skip(reason)
    made = [Machine(number, tmp_path, 1) for number in (1, 2, 3)]
    with netns.connected(made):
        yield made


def meet(nodes: list[Machine]) -> list[subprocess.CompletedProcess[str]]:
    """A rank on each node, and how they ended."""
    orders = {"addresses": [node.address for node in nodes], "port": 29_431}
    ranks = [
        subprocess.Popen(
            node.command(sys.executable, "-m", "tests.support.ranks.meeting", json.dumps(orders | {"rank": rank})),
            env=node.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    try:
        ends = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [
        subprocess.CompletedProcess(rank.args, rank.returncode, out, error)
        for rank, (out, error) in zip(ranks, ends, strict=True)
    ]


def heard(ends: list[subprocess.CompletedProcess[str]]) -> list[dict[str, Any]]:
    """What the ranks printed."""
    assert [end.returncode for end in ends] == [0] * len(ends), [end.stderr[-2000:] for end in ends]
    return [json.loads(end.stdout.splitlines()[-1]) for end in ends]


@pytest.mark.long
@pytest.mark.parametrize("name", ["127.0.1.1", None])
def test_ranks_meet_though_their_hosts_names_lead_nowhere(nodes: list[Machine], name: str | None) -> None:
    """Debian gives a host's name 127.0.1.1; a container's may have no address. There is another network."""
    for node in nodes:
        node.mislead(name)
    first, second = heard(meet(nodes[:2]))
    assert first["found"] == second["found"]
    assert first["variables"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert first["variables"]["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert all([what for what, _, _ in findings] == ["sums", "network"] for findings in first["found"].values())


@pytest.mark.long
def test_a_line_that_is_slow_is_named_by_its_ends(nodes: list[Machine]) -> None:
    """The third node receives at 100 Mbit/s. What it sends, and what the others do, is quick."""
    nodes[2].slow_receiving("100mbit")
    (told, *_) = heard(meet(nodes))
    slow = [
        (at, what, text)
        for at, findings in told["found"].items()
        for what, verdict, text in findings
        if verdict != "ok"
    ]
    ((at, what, text),) = slow
    assert (at, what) == (nodes[2].address, "network")
    assert "rank 1 (node" in text
    assert "to rank 2 (node" in text
