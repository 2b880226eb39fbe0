"""`tests/bench/failures.py`: simulated months against closed forms, and against what must hold of any month."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import fmean

import pytest
from failures import forecast, render
from failures_cluster import (
    MONTH_S,
    NODE_BACK_S,
    Copies,
    Fault,
    Kind,
    Outage,
    Way,
    draw_faults,
    draw_outages,
    noticed,
)
from failures_month import Month, Setting, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.plan.estimate.estimate import CheckpointTimes, estimate, goodput
from launcher.runtime.capacity.devices import Cluster, find_gpu
from launcher.runtime.policies.elastic import Sizing
from launcher.runtime.policies.failures import UNSAVED_FAILURES
from launcher.runtime.recipe.load import load

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
    found = [
        simulate(setting(512), ANEW, interval, only("rank", mtbf, seed), ()).goodput for seed in range(16)
    ]
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
        Outage(begin, min([begin + 3000, *(later for later in begins if later > begin)]))
        for begin in sorted(begins)
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
def test_every_second_is_accounted_for(
    faults: list[Fault], outages: list[Outage], interval: float, least: int
) -> None:
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


def test_a_month_without_faults_loses_only_saves_and_copies() -> None:
    month = simulate(setting(), STAY, 996.0, (), (), wall=1e5 + 95)
    assert month.restarts == 0
    assert {name for name, spent in month.lost.items() if spent} == {"restarting", "saving", "copying"}
    assert month.lost["restarting"] == 90.0
    assert month.lost["saving"] == pytest.approx(400.0)


def test_a_lost_node_is_done_without_and_taken_back() -> None:
    month = simulate(setting(), STAY, 600.0, [Fault(5000.0, "node", (1,))], (), wall=20_000.0)
    assert (month.restarts, month.stayed) == (2, 2)  # one without the node, one with it again
    assert month.from_store == 0
    assert month.lost["waiting"] == 60.0
    step, fewer = setting().step(8), setting().step(6)
    apart = month.lost["fewer ranks"] / (1 - step / fewer)
    assert 1700 < apart < 1900  # it is back after 1800 s, and the ranks have trained for 1800 s by then


def test_ranks_that_may_not_be_fewer_wait_for_their_machine() -> None:
    month = simulate(setting(least=8), STAY, 600.0, [Fault(5000.0, "node", (1,))], (), wall=20_000.0)
    assert month.lost["waiting"] == pytest.approx(NODE_BACK_S, abs=60)
    assert month.lost["fewer ranks"] == 0.0


def test_a_spare_machine_takes_the_place_of_a_lost_one() -> None:
    month = simulate(setting(most=6), STAY, 600.0, [Fault(5000.0, "node", (1,))], (), wall=20_000.0)
    assert (month.restarts, month.stayed) == (1, 1)
    assert month.lost.get("waiting", 0.0) == month.lost["fewer ranks"] == 0.0


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


def test_a_drained_node_hands_the_state_over_in_memory() -> None:
    """Where there are copies in memory. Otherwise the ranks save, and wait for the upload. Nothing is done twice."""
    fault = [Fault(5000.0, "notice", (0,))]
    stays, anew = (simulate(setting(), way, 3000.0, fault, (), wall=5900.0) for way in (STAY, ANEW))
    assert (stays.restarts, stays.stayed, stays.lost.get("repeated", 0.0)) == (1, 1, 0.0)
    assert (anew.restarts, anew.stayed, anew.lost.get("repeated", 0.0)) == (1, 0, 0.0)
    upload = setting().blocked + setting().behind
    assert anew.lost["saving"] - stays.lost["saving"] == pytest.approx(upload)


def test_commits_and_restarts_wait_for_the_store() -> None:
    fault = [Fault(5000.0, "rank", (0,))]
    well = simulate(setting(), ANEW, 1000.0, fault, (), wall=20_000.0)
    away = simulate(setting(), ANEW, 1000.0, fault, [Outage(3000.0, 7000.0)], wall=20_000.0)
    assert away.lost["repeated"] == pytest.approx(well.lost["repeated"] + 2000, abs=1)
    assert away.lost["restarting"] == pytest.approx(well.lost["restarting"] + 7000 - 5090.5, abs=1)
    stays = simulate(setting(), STAY, 1000.0, fault, [Outage(3000.0, 7000.0)], wall=20_000.0)
    assert stays.lost["repeated"] < 5
    assert stays.lost["restarting"] == pytest.approx(90 + 7000 - 5000 + 0.5, abs=1)


def test_a_second_death_on_a_node_waits_for_a_new_process() -> None:
    def restarting(*faults: Fault) -> float:
        return simulate(setting(), STAY, 1000.0, faults, (), wall=9000.0).lost["restarting"]

    first, soon, later = (
        Fault(at, "rank", (0,), place) for at, place in ((5000.0, 0), (5015.0, 1), (5100.0, 1))
    )
    alone = restarting(first)
    assert restarting(first, later) == pytest.approx(2 * alone - 90)
    assert restarting(first, soon) == pytest.approx(2 * alone - 90 + STAY.process)


def test_after_a_hang_and_for_a_new_machine_all_processes_or_some_are_new() -> None:
    hang = simulate(setting(), STAY, 1000.0, [Fault(5000.0, "hang", (0,))], (), wall=9000.0)
    assert (hang.restarts, hang.stayed) == (1, 0)
    assert hang.lost["restarting"] == pytest.approx(90 + 600 + 90 + 0.5)
    moved = simulate(setting(most=6), STAY, 1000.0, [Fault(5000.0, "node", (1,))], (), wall=9000.0)
    assert (moved.restarts, moved.stayed) == (1, 1)
    assert moved.lost["restarting"] == pytest.approx(90 + 30 + 5 + STAY.process + STAY.cold + 0.5)


def test_deaths_without_a_newer_checkpoint_end_the_run() -> None:
    faults = [Fault(600.0 * number, "rank", (number % 4,)) for number in range(1, UNSAVED_FAILURES + 4)]
    ended = simulate(setting(), ANEW, 1e6, faults, (), wall=1e5)
    assert ended.ended == 1
    assert simulate(setting(), STAY, 1e6, faults, (), wall=1e5).ended == 0  # each restart is at a newer step


def test_faults_come_as_often_as_said_and_in_the_published_proportions() -> None:
    cluster = Cluster(2048, 8, find_gpu("H100"), mtbf=54 * 24 * 3600 * 2048 / 419)
    months = [draw_faults(cluster, seed, 54 * 86400.0) for seed in range(40)]
    assert fmean(map(len, months)) == pytest.approx(466, rel=0.02)
    kinds = [fault.kind for month in months for fault in month]
    assert kinds.count("switch") / len(kinds) == pytest.approx(35 / 466, rel=0.1)
    assert kinds.count("notice") / len(kinds) == pytest.approx(47 / 466, rel=0.1)
    assert all(0 <= node < 2048 for month in months for fault in month for node in fault.nodes)
    assert draw_faults(cluster, 7) == draw_faults(cluster, 7) != draw_faults(cluster, 8)


def test_outages_do_not_overlap() -> None:
    for seed in range(60):
        found = draw_outages(seed)
        assert all(outage.begin < outage.end for outage in found)
        assert all(first.end < later.begin for first, later in pairwise(found))


def test_survivors_that_stay_lose_less_and_the_best_interval_is_no_worse() -> None:
    cluster = Cluster(4, 8, find_gpu("H100"), mtbf=300 * 3600)
    found = forecast(estimate(load("bert-base", ("microbatch=8",)), cluster))
    anew, shared, memory, stay = (one.at_best for one in found)
    assert stay.goodput > memory.goodput > max(anew.goodput, shared.goodput)
    assert memory.repeated < anew.repeated / 2
    assert stay.stayed > memory.stayed == anew.stayed == shared.stayed == 0
    assert all(one.at_best.goodput >= one.chosen.goodput - 1e-4 for one in found)
    assert render(found).count("\n") == 10
