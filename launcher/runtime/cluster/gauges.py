"""A run's figures for Prometheus, exported by Ray (`data_service.service.gauges`). infra/grafana/maskfleet.json draws
them.

Gauges show only the present, and disappear with the process that sets them. The run's records hold the history.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from data_service.service.gauges import StoreRetryGauge, make_gauge
from launcher.runtime.run.metrics import HELD_OUT, STEP, Metric, shown_on, term_losses

GAUGE_DESCRIPTIONS = {
    "step": "Steps done.",
    "loss": "Training loss of the newest step, per target, in nats, by term.",
    "heldout_loss": "Held-out loss of the newest evaluation, per target, in nats, by term.",
    **{metric.gauge: f"Newest {metric.tile_label()}." for metric in (*STEP, *HELD_OUT) if metric.gauge},
    "figure": "Further figures of the newest step or evaluation, by their name in its record.",
    "goodput": "Share of the time since this command began that was spent in steps that count.",
    "restarts": "Times that the ranks were started again by this command.",
}
_LABEL_BY_GAUGE = {"loss": "term", "heldout_loss": "term", "figure": "figure"}


class Gauges:
    """The gauges of one command's run, set by its driver. `clock`: monotonic seconds."""

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._retries = StoreRetryGauge()
        self._useful = 0.0  # seconds of steps that were done for the first time
        self._reached = 0
        self._gauges = {
            name: make_gauge(
                name, text, {"run": run}, *((_LABEL_BY_GAUGE[name],) if name in _LABEL_BY_GAUGE else ())
            )
            for name, text in GAUGE_DESCRIPTIONS.items()
        }

    def started(self, start_count: int) -> None:
        """Note that the command's `start_count`-th group of ranks begins."""
        self._set("restarts", start_count - 1)

    def record(self, record: Mapping[str, Any]) -> None:
        """Show a step's or an evaluation's record; figures that it lacks are left as they are."""
        if record["kind"] == "evaluation":
            self._set_loss_gauges("heldout_loss", record)
            self._set_metric_gauges(HELD_OUT, record)
        else:
            self._step(record)
        self._retries.update()

    def _step(self, record: Mapping[str, Any]) -> None:
        done, seconds = record.get("step", -1) + 1, record.get("seconds", 0.0)
        if done > self._reached:
            self._reached, self._useful = done, self._useful + seconds
        self._set_loss_gauges("loss", record)
        self._set("step", done)
        self._set_metric_gauges(STEP, record)
        self._set("goodput", min(1.0, self._useful / max(self._clock() - self._began, 1e-9)))

    def _set_loss_gauges(self, name: str, record: Mapping[str, Any]) -> None:
        for term, loss in term_losses(record).items():
            self._gauges[name].set(loss, {"term": term})

    def _set_metric_gauges(self, metrics: tuple[Metric, ...], record: Mapping[str, Any]) -> None:
        for metric in shown_on("gauge", metrics):
            value = metric.value_in(record)
            if value is None:
                continue
            if metric.gauge:
                self._set(metric.gauge, value)
            else:
                self._gauges["figure"].set(value, {"figure": metric.name})

    def _set(self, name: str, value: float) -> None:
        self._gauges[name].set(float(value))
