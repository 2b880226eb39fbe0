"""The report: the right figures, one self-contained page, whatever the run has been through."""

import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_service.store.local import LocalStore
from launcher.observe.inspect.report.chart import Chart, ReferenceLine, Series, bucket_points, draw_chart
from launcher.observe.inspect.report.curves import report_charts
from launcher.observe.inspect.report.evaluations import evaluations_html
from launcher.observe.inspect.report.figures import compute_figures, find_interruptions
from launcher.observe.inspect.report.page import ReportSubject, draw_page, render_page
from launcher.observe.inspect.status import status_from_history
from launcher.runtime.recipe.parts import EvaluationTask, HeldOutSettings
from launcher.runtime.run.evaluations import CommitWeights, DiagnosticCell, DiagnosticResult, EvaluatedCommit, Figure
from launcher.runtime.run.history import History, StepHistory
from launcher.runtime.run.outline import Outline, OutlineRecord, open_outline
from tests.support.checks.html import Page
from tests.support.runs.untrained import ToldRun

NOW = datetime(2026, 11, 20, tzinfo=UTC)
RECORD = {"format": 2, "name": "run", "created": "yesterday", "fingerprint": "f", "versions": {}}
RUN = Outline(
    uri="s3://bucket/run&x",
    store=LocalStore(Path("/nowhere")),
    name="a <b>run</b>",
    total_steps=100,
    flush_seconds=30.0,
    evaluation_samples=64,
    record=OutlineRecord.model_validate(RECORD | {"inputs": {"corpora": {"text": "c"}, "tokenizer": "t"}}),
    recipe="name: <script>",
    corpora={},
    tokenizer="bpe",
)


def step(number: int, **fields: Any) -> dict[str, Any]:
    usual = {
        "kind": "step",
        "step": number,
        "loss": 5.0,
        "mlm_loss": 5.0,
        "mlm_accuracy": 0.1,
        "tokens": 1000,
    }
    usual |= {"lr": 1e-3, "grad_norm": 1.0, "skipped": False, "seconds": 2.0, "data_wait": 0.5}
    usual |= {"data_wait_share": 0.25}
    return usual | fields


def event(kind: str, time: float, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "attempt": attempt, **fields}


def history(steps: int, *events: dict[str, Any], repeated: int = 0) -> History:
    figures = {"loss": 4.5, "mlm_loss": 4.5, "perplexity": 90.0, "mlm_accuracy": 0.2}
    evaluations = [{"kind": "evaluation", "step": 5} | figures]
    return History(
        StepHistory.from_records([step(number) for number in range(steps)]),
        tuple(evaluations) if steps else (),
        events,
        repeated,
        0.0,
    )


KILLED = history(
    10,
    event("start", 0.0, step=0),
    event("commit", 10.0, step=4, seconds=1.5, blocked=0.25),
    event("resume", 30.0, attempt=2, step=4),
    event("stop", 42.0, attempt=2, reason="SIGTERM"),
    event("resume", 50.0, attempt=3, step=10),
    event("end", 50.5, attempt=3),
    repeated=2,
)


def page_of(found: History) -> str:
    status = status_from_history(RUN, found, NOW.timestamp(), brief=True)
    return render_page(ReportSubject(RUN, status, {"unigram": 6.5}), found, NOW)


def test_figures_count_repeated_steps_once() -> None:
    figures = compute_figures(KILLED)
    assert (figures.steps, figures.tokens, figures.tokens_per_second) == (10, 10_000, 500.0)
    assert (figures.data_wait, figures.wall_seconds, figures.repeated) == (0.25, 50.5, 2)
    assert figures.goodput == pytest.approx(20 / 50.5)
    assert figures.blocked_seconds == 0.25


def test_time_goes_on_after_the_last_event_of_a_run_that_trains() -> None:
    running = history(10, event("start", 0.0, step=0), event("underway", 5.0))
    assert compute_figures(running, until=40.0).goodput == pytest.approx(20 / 40)
    assert compute_figures(running, until=40.0).wall_seconds == 40.0
    assert compute_figures(history(10, event("start", 0.0, step=0)), until=40.0).goodput == pytest.approx(20 / 40)
    assert compute_figures(KILLED, until=None) == compute_figures(KILLED)


def test_an_evaluation_that_is_not_finite_is_shown_as_that() -> None:
    bad = replace(KILLED, evaluations=({"kind": "evaluation", "step": 5, "loss": None, "mlm_loss": None},))
    page = page_of(bad)
    assert "not finite" in page
    assert " nat<" not in page


def test_every_interruption_has_its_cause() -> None:
    killed, stopped = find_interruptions(KILLED)
    assert (killed.attempt, killed.resumed_from, killed.downtime) == (1, 4, 20.0)
    assert "killed without notice" in killed.cause
    assert (stopped.attempt, stopped.resumed_from, stopped.downtime) == (2, 10, 8.0)
    assert stopped.cause == "asked to stop: SIGTERM"


DIED = history(
    10,
    event("start", 0.0, step=0),
    event("commit", 10.0, step=4, seconds=1.5, blocked=0.25),
    event("death", 20.0, attempt=0, of=1, step=9, ranks=[1], node="b", reason=None),
    event("resume", 27.0, attempt=2, step=4),
    event("underway", 28.0, attempt=2, step=5, seconds={"group": 0.5, "first step": 1.25}, age=3.0),
    event("hang", 40.0, attempt=2, what="rank 1 has been silent for 60 s", without_stacks=[1]),
    event("death", 42.0, attempt=0, of=2, step=8, ranks=[0, 1], node=None, reason=None),
)


def test_what_a_death_cost() -> None:
    died, stuck = find_interruptions(DIED)
    assert (died.cause, died.lost, died.downtime) == ("ranks died", 5, 8.0)
    assert died.recovery == {"group": 0.5, "first step": 1.25}
    assert (stuck.cause, stuck.lost, stuck.recovery) == (
        "ranks were stuck: rank 1 has been silent for 60 s",
        None,
        {},
    )
    text = " ".join(Page(page_of(DIED)).text.split())
    assert re.search(r"group 0\.5 s, .* 1\.2 s", text)


START = event("start", 0.0, step=0)
GROWN = {"from": 2, "to": 3, "cause": "the cluster has places for 3 ranks"}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([event("stop", 9.0, reason="SIGTERM")], [("asked to stop: SIGTERM", None, None)]),
        ([event("failed", 5.0, attempt=0, reason="no space")], [("failed: no space", None, None)]),
        ([event("end", 9.0, attempt=0, step=3), event("resume", 20.0, 2, step=3)], []),
        ([event("recipe_changed", 0.5, attempt=0, changes=["- a: 1 -> 2"])], []),
        (  # ranks that made room for more were not killed
            [
                event("pause", 20.0, attempt=0, reason="there is room for more ranks"),
                event("commit", 21.0, step=4, seconds=0.5, blocked=0.1),
                event("world", 29.0, attempt=0, **GROWN),
                event("resume", 30.0, attempt=2, step=4),
            ],
            [("paused: there is room for more ranks", 4, 10.0)],
        ),
    ],
)
def test_what_interrupts_a_run_and_what_does_not(
    events: list[dict[str, Any]], expected: list[tuple[str, int | None, float | None]]
) -> None:
    found = find_interruptions(history(5, START, *events))
    assert [(gap.cause, gap.resumed_from, gap.downtime) for gap in found] == expected


@pytest.mark.parametrize(
    "case",
    [KILLED, history(0), history(1, event("start", 0.0)), history(1)],
    ids=["killed", "new", "one", "bare"],
)
def test_the_page_stands_alone(case: History) -> None:
    html = page_of(case)
    page = Page(html)
    assert page.attributes("src", "href", "xlink:href") == []
    assert "script" not in html.replace("&lt;script&gt;", "")
    assert "url(" not in html
    assert "a <b>run</b>" in page.text


def test_the_page_shows_what_matters() -> None:
    text = Page(page_of(KILLED)).text
    for words in (
        "held-out loss on hidden tokens, perplexity 90.0",
        "2.00 nat",
        "below the unigram baseline",
        "SIGTERM",
        "39.6%",
    ):
        assert words in text
    assert "MLM loss" in text
    assert "MLM accuracy" in text
    assert "weighted" not in text


def test_damage_is_shown() -> None:
    damaged = replace(KILLED, damage=["metrics/a000001/00000003.jsonl, line 2: not <JSON>"])
    assert "metrics/a000001/00000003.jsonl, line 2: not <JSON>" in Page(page_of(damaged)).text
    assert "Damaged" not in Page(page_of(KILLED)).text


def test_every_term_has_its_curves() -> None:
    """A discriminator beside its generator: baselines are compared with the tokens' loss, not with the sum."""
    figures = {"loss": 9.5, "mlm_loss": 4.5, "rtd_loss": 0.1, "rtd_accuracy": 0.9, "rtd_precision": 0.6}
    figures |= {"rtd_recall": 0.5, "rtd_replaced": 0.1, "mlm_accuracy": 0.2}
    both = History(
        StepHistory.from_records([step(number, **figures) for number in range(10)]),
        ({"kind": "evaluation", "step": 5, "perplexity": 90.0} | figures,),
        (),
        0,
        0.0,
    )
    text = Page(page_of(both)).text
    for words in (
        "weighted sum of all terms",
        "MLM loss",
        "RTD loss",
        "RTD precision",
        "RTD recall",
        "RTD replaced",
    ):
        assert words in text
    assert "2.00 nat" in text


def test_figures_of_an_average_of_the_weights_are_drawn_beside_theirs() -> None:
    figures = {"loss": 4.5, "mlm_loss": 4.5, "mlm_accuracy": 0.2}
    averaged = {"average_mlm_loss": 4.25, "average_mlm_accuracy": 0.25}
    steps = StepHistory.from_records([step(number, **figures) for number in range(10)])
    evaluated = ({"kind": "evaluation", "step": 5} | figures | averaged,)
    drawn = {chart.title: chart.series for chart in report_charts(History(steps, evaluated, (), 0, 0.0), (), {})}
    for title, value in (("MLM loss", 4.25), ("MLM accuracy", 0.25)):
        assert [len(series.x) for series in drawn[title]] == [10, 1, 1]
        assert drawn[title][2].y.tolist() == [value]
    assert not [title for title in drawn if "AVERAGE" in title]


def test_skipped_steps_leave_gaps_not_errors() -> None:
    steps = StepHistory.from_records([step(0), step(1, loss=None, grad_norm=None, skipped=True), step(2)])
    html = page_of(History(steps, (), (), 0, 0.0))
    assert "steps skipped" in html
    assert "nan" not in html.lower().replace("finance", "")


def test_coordinates_stay_inside_the_chart() -> None:
    y = np.array([5.0, 1e6, 4.0, 3.0] * 300)
    chart = Chart("t", "u", (Series("s", np.arange(1200.0), y),), 1200.0, levels=(ReferenceLine("base", 7.0),))
    numbers = [
        float(pair.split(",")[1]) for pair in re.findall(r"[\d.]+,[\d.-]+", draw_chart(chart).split("points=", 1)[1])
    ]
    assert all(0 <= number <= 220 for number in numbers)


def test_a_chart_without_points_is_left_out() -> None:
    assert draw_chart(Chart("t", "u", (Series("s", np.empty(0), np.empty(0)),), 1.0)) == ""


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-9, 1e12])
def test_a_constant_series_can_be_drawn(value: float) -> None:
    drawn = draw_chart(Chart("t", "u", (Series("s", np.arange(3.0), np.full(3, value)),), 3.0))
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_what_happened_is_listed_and_a_machine_s_lasting_problem_once() -> None:
    files: dict[str, Any] = {"node": "n1", "host": "node-1", "problems": ["open files: 256"]}
    went_back: dict[str, Any] = {
        "to": 990,
        "reason": "losses that are not finite",
        "skipped": [[0, 3, 8, 10]],
    }
    happened = history(
        10,
        event("start", 0.0, step=0),
        event("preflight", 1.0, **files),
        event("straggler", 2.0, step=4, rank=3, host="node-2", ratio=2.25, doing="compute"),
        event("world", 3.0, attempt=0, **{"from": 2, "to": 3, "cause": "places for 3 ranks"}),
        event("rewind", 4.0, step=1_030, **went_back),
        event("resume", 9.0, attempt=2, step=990),
        event("preflight", 9.5, attempt=2, **files),
        event("commit", 12.0, attempt=2, step=995, seconds=1.0, blocked=0.25),
    )
    (gap,) = find_interruptions(happened)
    assert (gap.cause, gap.resumed_from, gap.downtime) == ("went back: losses that are not finite", 990, 5.0)
    page = page_of(happened)
    assert page.count("open files: 256") == 1, "every start finds it; once will do"
    for words in ("rank 3, host node-2, ratio 2.25", "from 2, to 3", "at step 1,030", "skipped 0, 3, 8, 10"):
        assert words in page
    assert page.count("<tr class=bad>") == 2, "the straggler and the rewind"
    assert "commit at step" not in page


def test_a_status_is_the_page_s_state(tmp_path: Path) -> None:
    run = ToldRun(tmp_path / "run")
    run.begin(1)
    run.steps(1, 0, 20)
    page = Page(draw_page(open_outline(str(run.folder)), {}, datetime.now(UTC))).text
    assert re.search(r"running.*node-7, process 12, attempt 1", page, re.DOTALL)
    assert re.search(r"step 20 of 1,000 \(2\.0%\), about 32m", page)
    run.event("failed", 1, time=9e9, reason="the disk is full")
    shutil.rmtree(run.folder / "attempts")
    assert "never started" in Page(draw_page(open_outline(str(run.folder)), {}, datetime.now(UTC))).text


@pytest.mark.parametrize("length", [1, 199, 201, 100_003])
def test_a_curve_holds_every_finite_value(length: int) -> None:
    """By another rule: the extremes of what was recorded are those of the buckets; gaps move nothing."""
    draw_numbers = np.random.default_rng(length)
    loss = np.asarray(draw_numbers.normal(size=length), dtype=np.float64)
    loss[draw_numbers.random(length) < 0.2] = np.nan
    steps = StepHistory.from_columns({"step": 3.0 * np.arange(length, dtype=np.float64), "mlm_loss": loss})
    found = [chart for chart in report_charts(History(steps, (), (), 0, 0.0), (), {}) if chart.title == "MLM loss"]
    trained = found[0].series[0]
    known = np.isfinite(loss)
    np.testing.assert_array_equal(trained.x, np.arange(length)[known] * 3.0)
    if known.any():
        mean_x, mean, low, high = bucket_points(trained.x, trained.y)
        assert np.all(np.diff(mean_x) > 0)
        assert np.all((low <= mean) & (mean <= high))
        assert (low.min(), high.max()) == (loss[known].min(), loss[known].max())
    assert found[0].x_end == 3.0 * (length - 1) + 1


@pytest.mark.parametrize("term", ["mlm", "clm", "plm", "diffusion", "denoise", "contrastive"])
def test_held_out_losses_of_commits_are_drawn_by_length(term: str) -> None:
    weights = "a" * 64
    task = EvaluationTask(heldout=HeldOutSettings())
    cell = DiagnosticCell(weights=weights, task=task, data="d" * 64, seed=0)
    figures = tuple(Figure(measure=f"{term}_{name}", value=2.5, length=128) for name in ("loss", "accuracy"))
    result = DiagnosticResult(cell=cell, figures=figures, seconds=1.0)
    page = evaluations_html([EvaluatedCommit(CommitWeights(step=4, attempt=1, weights=weights), (result,))], [])
    assert "128 tokens" in page
