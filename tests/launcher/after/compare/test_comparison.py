"""A comparison of small runs, from its first run to its page. Ranks are processes without Ray here."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from threading import Event

import pytest

from checkpoints.listing import committed
from launcher.after.compare import training
from launcher.after.compare.equality import differences, held
from launcher.after.compare.found import ComparisonState, read_found
from launcher.after.compare.page import dumped, render
from launcher.after.compare.place import Comparison, comparison_at, open_comparison
from launcher.after.compare.plan import arms_of
from launcher.after.compare.training import Work
from launcher.errors import CompareError
from launcher.runtime.cluster.ending import Ending
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from tests.support.checks.guide import promised
from tests.support.ranks.run_group import finish
from tests.support.runs.small_runs import SETTINGS, SMALL, history, ledger

pytestmark = pytest.mark.cluster

SEEDS = (1, 2)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SHORT = ("phases=[{steps: 6, length: 32, batch: {sequences: 8}}]", "schedule.warmup=1", "trainers=1")


def small(inputs: Path, *settings: str) -> Recipe:
    places = (f"corpus.sources.text.uri={inputs}/corpus", f"tokenizer.uri={inputs}/tokenizer")
    return load(SMALL, (*places, *SETTINGS, *SHORT, *settings))


def asked(inputs: Path, folder: Path) -> Comparison:
    recipes = {
        "base": small(inputs),
        "often": small(inputs, "objective.mlm.rate=0.4"),
        "wide": small(inputs, "model.feed_forward=96"),
    }
    return comparison_at(str(folder), arms_of(recipes, None, 2, ()), SEEDS, None)


@dataclass
class Trainer:
    """Trains runs in place of the command: without Ray. `starts`: the runs it was asked for."""

    starts: list[str]

    def __call__(self, uri: str, *, show: bool) -> Ending:
        self.starts.append(uri)
        finish(uri, 1)
        return Ending(0, "finished", 6, "")


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        trainer = Trainer([])
        patch.setattr(training, "train", trainer)
        yield trainer


@pytest.fixture(scope="module")
def done(inputs: Path, tmp_path_factory: pytest.TempPathFactory, trainer: Trainer) -> Comparison:
    comparison = asked(inputs, tmp_path_factory.mktemp("comparison"))
    work = Work(comparison, Event())
    said = list(work.done())
    assert not work.failures
    assert [line.split()[4] for line in said] == [
        "base-1",
        "often-1",
        "wide-1",
        "base-2",
        "often-2",
        "wide-2",
    ]
    return comparison


@pytest.fixture(scope="module")
def found(done: Comparison) -> ComparisonState:
    return read_found(done)


@pytest.mark.long
def test_runs_of_one_seed_read_the_same_rows(done: Comparison) -> None:
    for seed in SEEDS:
        first, *others = (ledger(done.uri(arm.label, seed)) for arm in done.arms)
        assert all(other == first for other in others)
    lines = {line.what: line for line in held(read_found(done))}
    assert lines["rows and their order"].equal
    assert not lines["what is predicted"].equal
    assert lines["the network"].how == "model.feed_forward"
    assert lines["tokens"].how == "1.5k"


PHASES = (
    "phases=[{steps: 3, length: 32, batch: {sequences: 8}}, {steps: 3, length: 32, batch: {sequences: 8}}]"
)


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("phases.1.mlm={rate: 0.05}", "what is predicted"),
        ("phases.1.weights={mlm: 0.5}", "what is predicted"),
        ("phases.1.lr=0.1", "the learning rate's course"),
        ("phases.1.length=24", "steps, row length and batch"),
    ],
)
def test_a_phases_own_setting_is_held_against_what_it_changes(
    inputs: Path, tmp_path: Path, setting: str, what: str
) -> None:
    recipes = {"base": small(inputs, PHASES), "other": small(inputs, PHASES, setting)}
    arms = arms_of(recipes, None, 2, ("budgets",))
    lines = held(read_found(comparison_at(str(tmp_path), arms, SEEDS, None)))
    sections = {line.what: line for line in lines if line.how.startswith("phases.")}
    assert [line.equal for line in sections.values()] == [False]
    assert list(sections) == [what]


@pytest.mark.long
def test_started_again_it_trains_nothing_twice(done: Comparison, trainer: Trainer) -> None:
    before = [committed(done.run(arm.label, seed).store) for arm in done.arms for seed in SEEDS]  # type: ignore[union-attr]
    starts = list(trainer.starts)
    assert not list(Work(done, Event()).done())
    assert trainer.starts == starts
    after = [committed(done.run(arm.label, seed).store) for arm in done.arms for seed in SEEDS]  # type: ignore[union-attr]
    assert before == after


def test_figures_are_those_of_the_runs(done: Comparison, found: ComparisonState) -> None:
    spread = found.spread("often", "mlm_loss")
    assert spread is not None
    assert spread.values == {
        seed: history(done.uri("often", seed)).evaluations[-1]["mlm_loss"] for seed in SEEDS
    }
    assert (spread.low, spread.high) == (min(spread.values.values()), max(spread.values.values()))


def test_the_common_figures_are_the_first_recipes_own(found: ComparisonState) -> None:
    """Under its own masks, on more rows than a run measures; where the rows are all there are, to rounding."""
    common, own = found.spread("base", "common mlm_loss"), found.spread("base", "mlm_loss")
    assert common is not None
    assert own is not None
    assert common.values[1] == pytest.approx(own.values[1], rel=0.05)
    assert found.spread("wide", "common mlm_accuracy") is not None


def test_curves_run_over_tokens_and_flops(found: ComparisonState) -> None:
    for arm in found.comparison.arms:
        for unit in ("tokens", "flops"):
            curve = found.curve(arm, lambda one: one.held_out("mlm_loss"), unit)
            assert curve.x.tolist() == [arm.cost.of(unit, step) for step in (0, 3, 6)]
            assert (curve.low <= curve.mean).all()
            assert (curve.mean <= curve.high).all()
        trained = found.curve(arm, lambda one: one.trained("mlm_loss"), "tokens")
        assert trained.x.tolist() == [256 * step for step in range(1, 7)]


class Page(HTMLParser):
    """Counts what is open, and keeps what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.charts, self.text = 0, ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.charts += tag == "svg"
        assert not {"src", "href"} & {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_the_page_and_its_json_say_the_same(found: ComparisonState) -> None:
    page = Page()
    page.feed(render(found, {"wide-2": "it failed"}, NOW))
    assert page.charts == 4
    record = json.loads(dumped(found, {"wide-2": "it failed"}))
    assert list(record) == promised("compare")[: len(record)]
    for said in ("wide-2: it failed", "rows and their order", "0.15 -> 0.4"):
        assert said in page.text
    for recipe in record["recipes"].values():
        low, high = (f"{recipe['figures']['mlm_loss'][edge]:.4g}" for edge in ("low", "high"))
        assert f"({low} to {high})" in page.text
    against = record["recipes"]["often"]["against"]["mlm_loss"]
    pairs = [record["recipes"][name]["runs"] for name in ("often", "base")]
    literal = [pairs[0][seed]["figures"]["mlm_loss"] - pairs[1][seed]["figures"]["mlm_loss"] for seed in "12"]
    assert against["mean"] == pytest.approx(sum(literal) / 2)
    assert (against["low"], against["high"]) == pytest.approx((min(literal), max(literal)))


def test_it_is_opened_again_by_its_place(done: Comparison) -> None:
    again = open_comparison(done.store.uri)
    assert [arm.recipe for arm in again.arms] == [arm.recipe for arm in done.arms]
    assert again.seeds == SEEDS
    with pytest.raises(CompareError, match="comparison"):
        open_comparison(f"{done.store.uri}/runs")


def test_another_recipe_in_its_place_is_refused_before_anything_is_trained(
    inputs: Path, done: Comparison, trainer: Trainer
) -> None:
    recipes = {"base": small(inputs), "often": small(inputs, "objective.mlm.rate=0.5")}
    changed = comparison_at(done.store.uri, arms_of(recipes, None, 2, ()), (1, 2, 3), None)
    starts = list(trainer.starts)
    with pytest.raises(CompareError, match=r"objective.mlm.rate: 0.4 -> 0.5"):
        list(Work(changed, Event()).done())
    assert trainer.starts == starts
    assert differences(*changed.arms) == ["- objective.mlm.rate: 0.15 -> 0.5"]
    done.keep()


@pytest.mark.long
def test_a_run_that_cannot_be_trained_does_not_stop_the_others(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = asked(inputs, tmp_path)
    refused = Ending(2, "mistake", 0, "no such GPU\n")
    monkeypatch.setattr(training, "train", lambda uri, *, show: refused)
    work = Work(comparison, Event())
    assert len(list(work.done())) == 6
    assert len(work.failures) == 6
    assert "GPU" in work.failures["often-2"]
    assert not read_found(comparison).complete
    assert "complete" in render(read_found(comparison), work.failures, NOW)


@pytest.mark.long
def test_an_interrupt_while_a_run_takes_its_last_steps_begins_no_other(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison, interrupted, starts = asked(inputs, tmp_path), Event(), []

    def finished_all_the_same(uri: str, *, show: bool) -> Ending:
        starts.append(uri)
        interrupted.set()
        return Ending(0, "finished", 6, "")

    monkeypatch.setattr(training, "train", finished_all_the_same)
    with pytest.raises(KeyboardInterrupt):
        list(Work(comparison, interrupted).done())
    assert starts == [comparison.uri("base", 1)]
