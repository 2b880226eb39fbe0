"""What the operator sees, on a terminal and in a log file; what is shown to Prometheus, and the dashboard that draws
it. tests/cluster/test_metrics_port.py asks Ray itself."""

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from data_service.service.gauges import GAUGE_DESCRIPTIONS as SERVICE
from launcher.output import human_bytes, human_count, human_duration
from launcher.runtime.cluster import display
from launcher.runtime.cluster.display import GAUGE_DESCRIPTIONS, Gauges, ProgressDisplay
from tests.support.runs import untrained


def step_record(step: int, **fields: Any) -> dict[str, Any]:
    record = {
        "kind": "step",
        "step": step,
        "seconds": 0.5,
        "tokens": 1000,
        "data_wait": 0.05,
        "skipped": False,
    }
    return record | {"loss": 2.0, "mlm_loss": 2.0} | fields


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_now_and_then() -> None:
    out, clock = io.StringIO(), Clock()
    watch = ProgressDisplay(Console(file=out, width=200), 100, clock)
    for step in range(100):
        clock.now = step / 2
        watch.record(step_record(step))
    watch.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "21/100", "41/100", "61/100", "81/100", "100/100"]
    assert lines[1] == "step 21/100  mlm 2.000  2k tokens/s  data wait 10%  ETA 39.5s"


def test_terms_are_shown_by_name_and_the_perplexity_beside_its_own() -> None:
    """Of ELECTRA: the weighted sum is nobody's loss, and the perplexity is the generator's."""
    out = io.StringIO()
    watch = ProgressDisplay(Console(file=out, width=200), 10)
    terms = {"loss": 19.01, "mlm_loss": 4.4673, "rtd_loss": 0.291}
    evaluation = {"kind": "evaluation", "step": 2, "perplexity": 87.13, **terms}
    watch.record(step_record(1, mfu=0.314, **terms))
    watch.record(evaluation)
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 2/10  mlm 4.467  rtd 0.291  2k tokens/s  data wait 10%  MFU 31.4%  ETA 4.0s"
    assert lines[1] == "step 2/10  held out: mlm 4.467 (perplexity 87.13)  rtd 0.291"
    assert "19.01" not in out.getvalue()


def test_a_terminal_gets_one_live_line_and_notes_above_it() -> None:
    out = io.StringIO()
    watch = ProgressDisplay(Console(file=out, width=120, force_terminal=True), 10)
    watch.record(step_record(0))
    watch.note("a [bold]note[/] is text")
    watch.record(step_record(9, mlm_loss=1.0))
    watch.close()
    watch.close()
    assert " [bold]note[/] " in out.getvalue()
    assert "10/10" in out.getvalue()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (human_count(999), "999"),
        (human_count(1_234_567), "1.2M"),
        (human_count(500_000), "500k"),
        (human_bytes(3 << 30), "3.0 GiB"),
        (human_bytes(10), "10 B"),
        (human_duration(5.25), "5.2s"),
        (human_duration(61), "1m 01s"),
        (human_duration(7260), "2h 01m"),
        (human_duration(90_061), "1d 1h"),
    ],
)
def test_numbers_are_shown_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected


def test_before_the_first_step_the_live_line_names_what_the_first_rank_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named: list[str] = []

    @contextmanager
    def work(name: str) -> Iterator[Any]:
        named.append(name)
        yield SimpleNamespace(begin_part=named.append)

    monkeypatch.setattr("launcher.runtime.cluster.display.work", work)
    watch = ProgressDisplay(Console(file=io.StringIO()), 10)
    watch.note("starting 2 ranks")
    for doing in ("starting", "trying kernels", "trying kernels", "starting", "compiling"):
        watch.show_activity(doing)
    assert named[1:] == ["starting 2 ranks", "trying kernels", "starting 2 ranks", "compiling"]


def test_a_skipped_step_does_not_spoil_the_loss() -> None:
    out = io.StringIO()
    watch = ProgressDisplay(Console(file=out, width=200), 1)
    watch.record(step_record(0, skipped=True, loss=float("nan"), mlm_loss=float("nan")))
    assert "nan" not in out.getvalue()


DASHBOARD = Path(__file__).parents[4] / "infra/grafana/maskfleet.json"
LABELS = {"run", "term", "figure", "SessionName", "WorkerId"}  # ours, and those of Ray that are drawn


class Shown:
    """Stands for Ray's gauges: what was set last, by name and term."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def gauge(self, name: str, *_: object) -> Any:
        values = self.values

        class Gauge:
            def set(self, value: float, tags: dict[str, str] | None = None) -> None:
                values[name if tags is None else f"{name} {next(iter(tags.values()))}"] = value

        return Gauge()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    monkeypatch.setattr(display, "make_gauge", shown.gauge)
    return shown


def test_records_are_shown_by_term_and_figures_without_a_gauge_of_their_own_share_one(shown: Shown) -> None:
    gauges = Gauges("run")
    gauges.record(untrained.step_record(3, attempt=3) | {"mfu": 0.25, "generator_grad_norm": 0.5})
    evaluation = {"loss": 9.0, "mlm_loss": 2.5, "rtd_loss": 0.3, "perplexity": 7.4}
    gauges.record({"kind": "evaluation", "step": 4, **evaluation})
    found, of_step = shown.values, {"step": 4, "loss mlm": 2.0, "loss rtd": 1.0, "tokens_per_second": 4012}
    of_step |= {"mfu": 0.25, "data_wait_share": 0.2, "figure generator_grad_norm": 0.5}
    of_evaluation = {"heldout_loss mlm": 2.5, "heldout_loss rtd": 0.3, "heldout_perplexity": 7.4}
    assert {name: found[name] for name in (*of_step, *of_evaluation)} == of_step | of_evaluation


def test_goodput_counts_a_step_once(shown: Shown) -> None:
    """Ten seconds, four steps of a quarter of one, one of them done twice."""
    clock = Clock()
    state = Gauges("run", clock)
    clock.now = 10.0
    for step in (0, 1, 2, 2, 3):
        state.record(untrained.step_record(step, attempt=1))
    assert shown.values["goodput"] == pytest.approx(0.1)


def test_restarts_are_the_starts_after_the_first(shown: Shown) -> None:
    state = Gauges("run")
    for starts in (1, 2, 3):
        state.count_start(starts)
    assert shown.values["restarts"] == 2


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_draws_all_that_is_exported_and_nothing_else() -> None:
    drawn = {name for text in expressions() for name in re.findall(r"ray_maskfleet_(\w+)", text)}
    assert drawn == {*GAUGE_DESCRIPTIONS, *SERVICE}


def test_the_dashboard_uses_labels_that_there_are() -> None:
    for text in expressions():
        matched = re.findall(r"\{(\w+)=", text)
        grouped = [name for names in re.findall(r"by \(([^)]*)\)", text) for name in names.split(", ")]
        assert {*matched, *grouped} <= LABELS, text
        ours = set(re.findall(r"ray_maskfleet_(\w+)", text)) <= GAUGE_DESCRIPTIONS.keys()
        assert ("run" in matched) == ours, f"{text}: only the driver's gauges say which run they are of"
