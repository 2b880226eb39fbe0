"""`maskfleet estimate --failures`: what it prints, and figures that must hang together."""

import json

import pytest
from typer.testing import CliRunner

from launcher.app.cli.main import app
from launcher.errors import OptionError
from launcher.plan.estimate.estimate import estimate
from launcher.plan.failures.forecast import Forecast, forecast
from launcher.plan.failures.recovery import (
    ACTORS_A_SECOND,
    NETWORK_SHARE,
    PROCESS_S,
    Run,
    Standby,
    seconds,
    standby,
    ways,
)
from launcher.plan.failures.render import figures, render, render_standby
from launcher.runtime.capacity.devices import LINK_SHARE, Cluster, find_gpu
from launcher.runtime.policies.recovery import COPIES_SHARE
from launcher.runtime.recipe.load import load

BERT = ("bert-base", "--nodes", "4", "--gpus-per-node", "8", "--gpu", "h100", "--mtbf-hours", "300")


@pytest.fixture(scope="module")
def found() -> Forecast:
    e = estimate(load("bert-base", ("microbatch=8",)), Cluster(4, 8, find_gpu("H100"), mtbf=300 * 3600))
    return forecast(e)


@pytest.mark.long
def test_survivors_that_stay_lose_less(found: Forecast) -> None:
    anew, shared, memory, stay = found.ways
    assert stay.at_best.goodput > memory.at_best.goodput > max(anew.at_best.goodput, shared.at_best.goodput)
    assert memory.at_best.steps < anew.at_best.steps / 2
    assert memory.at_best.stayed == 0
    assert stay.at_best.steps < anew.at_best.steps / 2
    assert stay.at_best.stayed > 0
    assert anew.at_best.stayed == shared.at_best.stayed == 0
    assert anew.at_best.restarts == pytest.approx(stay.at_best.restarts, rel=0.1)


def test_the_best_interval_is_not_worse_than_the_recipes(found: Forecast) -> None:
    for way in found.ways:
        assert way.at_best.goodput >= way.chosen.goodput - 1e-4
        assert way.chosen.interval == 900.0
        assert way.at_best.lowest <= way.at_best.goodput <= way.at_best.highest
        assert way.at_best.goodput + sum(way.at_best.lost.values()) == pytest.approx(1)


def test_limits_grow_with_the_ranks(found: Forecast) -> None:
    assert [limit.used for limit in found.limits] == sorted((one.used for one in found.limits), reverse=True)
    for limit in found.limits:
        if limit.ranks is not None:
            assert limit.used == pytest.approx(32 / limit.ranks, rel=1e-3)


@pytest.mark.long
def test_copies_burden_neither_steps_nor_network() -> None:
    """Of a large state in short steps on a slow network."""
    e = estimate(load("deberta-v2-xxlarge", ("microbatch=2",)), Cluster(2, 8, find_gpu("A10G"), mtbf=1e9))
    kept = standby(e)
    assert kept.copies is not None
    between = kept.copies.every * kept.step
    assert kept.copies.transfer <= NETWORK_SHARE * between
    assert kept.copies.stall <= COPIES_SHARE * between
    assert kept.copies.bytes == pytest.approx(4 * e.checkpoints.bytes / 2)
    assert kept.network == pytest.approx(LINK_SHARE * kept.copies.transfer / between)


@pytest.mark.long
def test_the_command_prints_table_and_arithmetic() -> None:
    result = CliRunner().invoke(app, ["estimate", *BERT, "--failures"])
    assert result.exit_code == 0
    for shown in (
        "265 s / 98,304 x 32 ranks",
        "survivors stay",
        "Llama 3",
        "best interval",
        "s a heartbeat",
    ):
        assert shown in result.output
    assert "Llama 3" not in CliRunner().invoke(app, ["estimate", *BERT]).output


@pytest.mark.long
def test_the_recipe_says_what_is_held_ready() -> None:
    cluster = Cluster(4, 8, find_gpu("H100"), mtbf=300 * 3600)

    def kept(*settings: str) -> Standby:
        return standby(estimate(load("bert-base", settings), cluster))

    auto, rare = kept(), kept("recovery.memory_every=50", "recovery.spares=4")
    assert auto.copies is not None
    assert rare.copies is not None
    assert rare.copies.every == 50
    assert rare.copies.stall == auto.copies.stall <= 0.01 * auto.copies.every * auto.step
    assert rare.network == pytest.approx(auto.network * auto.copies.every / 50)
    assert rare.spares == 2 * auto.spares > 0
    never = estimate(load("bert-base", ("recovery.memory_every=never", "recovery.spares=0")), cluster)
    assert standby(never).copies is None
    assert render_standby(never)


@pytest.mark.long
def test_a_spare_process_for_each_rank_saves_new_ones() -> None:
    def restart(spares: int) -> float:
        e = estimate(
            load("bert-base", (f"recovery.spares={spares}",)), Cluster(64, 8, find_gpu("H100"), mtbf=1e9)
        )
        return seconds(ways(e.cluster, Run(1e9, 0.1, 1, True, e.recipe.recovery.spares), "auto")[2].anew)

    assert restart(7) == restart(1) == pytest.approx(restart(8) + PROCESS_S + 512 / ACTORS_A_SECOND)


@pytest.mark.long
def test_without_copies_in_memory_every_death_goes_back_to_a_commit() -> None:
    e = estimate(
        load("bert-base", ("recovery.memory_every=never",)), Cluster(4, 8, find_gpu("H100"), mtbf=3e5)
    )
    found = forecast(e)
    anew, _, memory, stay = found.ways
    assert stay.at_best.stayed > 0
    assert stay.chosen.from_store == pytest.approx(anew.chosen.from_store, rel=0.1)
    assert memory.way.copies is stay.way.copies is stay.best.copies is None
    assert render(e, found)


def test_without_a_cluster_nothing_is_measured_first() -> None:
    result = CliRunner().invoke(app, ["estimate", "bert-base", "--measure", "--failures"])
    assert isinstance(result.exception, OptionError)
    assert "--measure" not in result.exception.remedy


@pytest.mark.long
def test_as_json_it_has_the_same_figures(found: Forecast) -> None:
    result = CliRunner().invoke(app, ["estimate", *BERT, "--set", "microbatch=8", "--failures", "--json"])
    told = json.loads(result.stdout)["failures"]
    assert told == json.loads(json.dumps(figures(found)))
    assert [way["name"] for way in told["ways"]] == [way.way.name for way in found.ways]
    assert "failures" not in json.loads(CliRunner().invoke(app, ["estimate", *BERT, "--json"]).stdout)


@pytest.mark.long
def test_a_single_gpu_has_a_forecast_too() -> None:
    e = estimate(load("bert-base"), Cluster(1, 1, find_gpu("H100"), mtbf=100 * 3600))
    alone = forecast(e)
    assert alone.ways[-1].at_best.from_store > 0  # nobody else keeps a copy
    assert render(e, alone)
