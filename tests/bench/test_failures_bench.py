"""`tests/bench/failures.py`: simulated months against closed forms, and against what must hold of any month."""

from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
from failures_cluster import MONTH_S, Copies, Fault, Kind, Outage, Way, draw_faults, noticed
from failures_month import Month, Setting, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.plan.estimate.estimate import CheckpointTimes, goodput
from launcher.runtime.capacity.devices import Cluster, find_gpu
from launcher.runtime.policies.elastic import Sizing

ANEW = Way("all new", 90.0, cold=20.0, load=10.0)
COPIES = Copies(every=2, stall=0.01, transfer=0.3)
STAY = replace(ANEW, stay=5.0, recall=0.5, copies=COPIES)


def setting(nodes: int = 4, each: int = 2, *, least: int = 1, most: int | None = None) -> Setting:
    ranks = most or nodes * each
    sizing = Sizing(least, ranks, ranks, wait=60.0, grow=1800.0, each={"GPU": 1.0})
    return Setting(nodes, each, sizing, 8 * nodes * each, 0.1, 0.2, blocked=4.0, behind=20.0, hang=600.0)


def only(kind: Kind, mtbf: float, seed: int, *, nodes: int = 512, wall: float = MONTH_S) -> list[Fault]:
    draw, now, found = Random(seed), 0.0, list[Fault]()
    while (now := now + draw.expovariate(1 / mtbf)) < wall:
        found.append(Fault(now, kind, (draw.randrange(nodes),), draw.randrange(2)))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("mtbf", "interval"), [(4000.0, 600.0), (20_000.0, 900.0), (20_000.0, 300.0)])
def test_goodput_is_that_of_dalys_model(mtbf: float, interval: float) -> None:
    """Deaths of single ranks at a constant rate, and a store that always answers. With few nodes, the failure
    policy would exclude some that died several times by chance."""
    restart = noticed("rank", 0.0, setting(512).ranks) + ANEW.anew + ANEW.load
    saving = CheckpointTimes(blocked=4.0, behind=20.0, restart=restart)
    found = [simulate(setting(512), ANEW, interval, only("rank", mtbf, seed), ()).goodput for seed in range(16)]
    assert fmean(found) == pytest.approx(goodput(saving, interval, mtbf), rel=0.01)


FAULTS = st.lists(
    st.builds(
        lambda at, kind, node, place: Fault(
            at, kind, (node - node % 2, node - node % 2 + 1) if kind == "switch" else (node,), place
        ),
        st.floats(0, 9.9e4),
        st.sampled_from(["rank", "hang", "node", "switch", "notice"]),
        st.integers(0, 3),
        st.integers(0, 1),
    ),
    max_size=60,
).map(lambda faults: sorted(faults, key=lambda fault: fault.at))
OUTAGES = st.lists(st.floats(0, 9e4), max_size=3, unique=True).map(
    lambda begins: [
        Outage(begin, min([begin + 3000, *(later for later in begins if later > begin)])) for begin in sorted(begins)
    ]
)


def check(month: Month) -> None:
    assert month.useful + sum(month.lost.values()) == pytest.approx(month.wall, rel=1e-9)
    assert 0 <= month.goodput <= 1
    assert (
        max(month.stayed, month.from_store) <= month.restarts
    )  # processes may stay, and their state come from the store
    assert all(spent >= 0 for cause, spent in month.lost.items() if cause != "repeated")


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(FAULTS, OUTAGES, st.sampled_from([50.0, 400.0, 3000.0]), st.sampled_from([1, 4, 8]))
def test_every_second_is_accounted_for(faults: list[Fault], outages: list[Outage], interval: float, least: int) -> None:
    for way in (ANEW, STAY):
        check(simulate(setting(least=least), way, interval, faults, outages, wall=1e5))


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(FAULTS, st.sampled_from([400.0, 3000.0]))
def test_no_more_is_done_twice_where_survivors_stay(faults: list[Fault], interval: float) -> None:
    """With single deaths far enough apart that no spare process and no second copy is missing."""
    apart = [
        replace(fault, at=2000.0 * number + 500.0, kind="rank", nodes=(number % 4,))
        for number, fault in enumerate(faults[:45], 1)
    ]
    anew = simulate(setting(), ANEW, interval, apart, (), wall=1e5)
    stay = simulate(setting(), STAY, interval, apart, (), wall=1e5)
    assert stay.stayed == stay.restarts == len(apart)
    step = setting().full
    assert stay.lost.get("repeated", 0.0) <= len(apart) * (2 * step + 0.02 + 0.3 + step)
    assert stay.goodput >= anew.goodput - 0.01 / (2 * step)  # what copies cost


@pytest.mark.parametrize(
    ("faults", "from_store"),
    [
        ([Fault(5000.0, "switch", (0, 1))], 0),  # partners are on the other side of the ring
        ([Fault(5000.0, "switch", (0, 2))], 1),  # both holders
        (
            [Fault(5000.0, "node", (0,)), Fault(5040.0, "node", (2,))],
            1,
        ),  # the holder, before there is a new copy
        ([Fault(5000.0, "node", (0,)), Fault(5040.0, "node", (1,))], 0),
        ([Fault(5000.0, "rank", (0,)), Fault(5004.0, "rank", (3,))], 0),  # while the ranks come together
        ([Fault(5000.0, "rank", (0,)), Fault(5004.0, "node", (0,))], 0),
        ([Fault(5000.0, "hang", (0,))], 0),
        ([Fault(5000.0, "notice", (0,))], 0),
    ],
)
def test_the_store_is_needed_where_both_holders_are_lost(faults: list[Fault], from_store: int) -> None:
    month = simulate(setting(), STAY, 1000.0, faults, (), wall=9000.0)
    assert month.from_store == from_store


def test_faults_come_as_often_as_said_and_in_the_published_proportions() -> None:
    cluster = Cluster(2048, 8, find_gpu("H100"), mtbf=54 * 24 * 3600 * 2048 / 419)
    months = [draw_faults(cluster, seed, 54 * 86400.0) for seed in range(40)]
    assert fmean(map(len, months)) == pytest.approx(466, rel=0.02)
    kinds = [fault.kind for month in months for fault in month]
    assert kinds.count("switch") / len(kinds) == pytest.approx(35 / 466, rel=0.1)
    assert kinds.count("notice") / len(kinds) == pytest.approx(47 / 466, rel=0.1)
    assert all(0 <= node < 2048 for month in months for fault in month for node in fault.nodes)
    assert draw_faults(cluster, 7) == draw_faults(cluster, 7) != draw_faults(cluster, 8)
