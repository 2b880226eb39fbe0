"""What is shown to Prometheus, and the dashboard that draws it. tests/cluster/test_metrics_port.py asks Ray itself."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from data_service.service.gauges import GAUGE_DESCRIPTIONS as SERVICE
from launcher.runtime.cluster import display
from launcher.runtime.cluster.display import GAUGE_DESCRIPTIONS, Gauges
from tests.support.runs.untrained import step_record

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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    monkeypatch.setattr(display, "make_gauge", shown.gauge)
    return shown


def test_records_are_shown_by_term_and_figures_without_a_gauge_of_their_own_share_one(shown: Shown) -> None:
    gauges = Gauges("run")
    gauges.record(step_record(3, attempt=3) | {"mfu": 0.25, "generator_grad_norm": 0.5})
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
        state.record(step_record(step, attempt=1))
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
