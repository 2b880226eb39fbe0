"""Real steps on real ranks: what they took, part by part; and the command from end to end."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher.app.cli.main import app
from launcher.errors import EstimateError
from launcher.plan.measure.measure import measure, prepare
from launcher.plan.measure.trial import Machine, choose
from launcher.runtime.recipe.load import load, reload
from launcher.runtime.recipe.source import bundled
from launcher.runtime.recipe.tiny import tiny
from tests.support.ranks import measures
from tests.support.ranks.forked import run_ranks

pytestmark = pytest.mark.cluster

WORLD = 2
MACHINE = Machine(WORLD, "cpu", "a CPU", 1, 1 << 40, 1e12, None)
SMALL = ("model.vocab=600", "model.hidden=32", "model.heads=2", "model.feed_forward=64")
# The others are their families' in other sizes.
FAMILIES = ("bert-base", "albert-base", "spanbert-base", "xlnet-base", "electra-small", "deberta-base-sop",
            "deberta-v2-xlarge", "deberta-v3-small", "modernbert-base", "eurobert-210m", "distilbert-base",
            "contrastive-base", "simcse-base")  # fmt: skip


def taken(name: str, folder: Path, *settings: str) -> list[dict[str, Any]]:
    """What each of two ranks finds of a recipe's small form."""
    recipe = tiny(load(name))
    distil = recipe.objective.distil
    teachers = range(len(distil.teachers)) if distil is not None else ()
    alike = [f"objective.distil.teachers.{number}.{setting}" for number in teachers for setting in SMALL]
    recipe = reload(recipe, (*SMALL, *alike, *settings))
    run = prepare(choose(recipe, recipe.phases[0], MACHINE), str(folder))
    found: list[dict[str, Any]] = run_ranks(measures.take, WORLD, run, 0.2)
    return found


def check(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert len(rank["steps"]) >= 3
        assert (list(rank["mfu"]), rank["peak_flops"]) == ([], None)  # a CPU
        for step in rank["steps"]:
            parts = step["data"] + step["forward"] + step["backward"] + step["update"]
            assert 0 < parts <= step["seconds"]
            assert step["last"] <= step["backward"]
            assert min(step["forward"], step["last"], step["update"], step["tokens"]) > 0
        assert 0 < rank["exchange"] <= 1
        assert rank["peak_bytes"] > 1 << 20
        shares = [share for _, share in rank["operators"]]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1
    assert [s["tokens"] for s in found[0]["steps"]] == [s["tokens"] for s in found[1]["steps"]]


@pytest.mark.long
def test_two_ranks_time_their_steps(tmp_path: Path) -> None:
    check(taken("roberta-base", tmp_path, "zero=2"))


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("zero", [1, 3])
def test_every_family_can_be_measured(name: str, zero: int, tmp_path: Path) -> None:
    assert name in bundled()
    check(taken(name, tmp_path, f"zero={zero}"))


@pytest.mark.long
def test_the_command_measures_and_tells_the_run() -> None:
    """One rank: there is one microbatch."""
    settings = (*SMALL, "phases.0.batch.sequences=16", "phases.0.steps=100", "schedule.warmup=10")
    words = ["estimate", "roberta-base", "--tiny", "--measure", "--json"]
    ended = CliRunner().invoke(app, [*words, *(word for each in settings for word in ("--set", each))])
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert found["recipe"] == "roberta-base"
    (phase,) = found["measured"]["phases"]
    assert found["measured"]["machine"]["ranks"] == 1
    assert phase["whole_seconds"] == phase["step_seconds"]["median"], "the recipe's own step was measured"
    assert found["measured"]["seconds"] == pytest.approx(100 * phase["whole_seconds"])
    assert " 32" in ended.stderr


@pytest.mark.long
def test_a_rank_that_fails_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "launcher.plan.measure.measure.this_machine", lambda recipe: replace(MACHINE, ranks=1)
    )
    monkeypatch.setattr("launcher.plan.measure.measure.prepare", lambda trial, folder: f"{folder}/nowhere")
    with pytest.raises(EstimateError, match=r"rank 0 of 1 .*: RunError: .*/nowhere"):
        measure(reload(tiny(load("roberta-base")), SMALL), lambda line: None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no cluster is given"),
        (("--nodes", "2"), "without --gpus-per-node and --gpu"),
        (("--measure", "--mfu", "0.3"), "--mfu 0.3 is given with --measure"),
    ],
)
def test_options_that_do_not_go_together(words: tuple[str, ...], said: str) -> None:
    ended = CliRunner().invoke(app, ["estimate", "roberta-base", *words])
    assert said in str(ended.exception)
