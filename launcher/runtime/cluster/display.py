"""Shows the progress of a run while it trains: on a terminal, one line that is rewritten; otherwise, a new line every
ten seconds; and as Prometheus gauges, which Ray exports (`data_service.service.gauges`) and
infra/grafana/maskfleet.json plots. The history of a run is in its records, not here."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from data_service.service.gauges import StoreRetryGauge, make_gauge
from launcher.output import human_duration
from launcher.progress import silence_progress, work
from launcher.runtime.run.metrics import (
    HELD_OUT_METRICS,
    STEP_METRICS,
    Metric,
    losses_text,
    metrics_shown_on,
    running_mean,
    term_losses,
)

_PLAIN_LINE_INTERVAL_S = 10.0  # time between lines if the output is no terminal
_STARTING = "starting"  # activity that a rank reports while it does nothing that takes long
# Fields of step records whose running means are shown.
_SHOWN_FIELDS = {"seconds", *(name for metric in metrics_shown_on("progress") for name in metric.fields)}


class ProgressDisplay:
    """Shows the progress of training on the console. Close it when training is over."""

    def __init__(self, console: Console, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._total = total_steps
        self._clock = clock
        self._means: dict[str, float] = {}
        self._losses: dict[str, float] = {}  # losses of the newest step whose update was not skipped, by term
        self._printed_at = float("-inf")
        self._steps = False
        self._bar: Progress | None = None
        self._alone = ExitStack()  # silences other progress displays while steps are shown
        self._beginning = self._alone.enter_context(work("beginning"))
        self._doing, self._noted = _STARTING, "beginning"
        self._task = TaskID(0)

    def record(self, record: Mapping[str, Any]) -> None:
        """Show the record of a step or an evaluation. Its fields are described in infra/docs/records.md."""
        if record["kind"] == "step":
            self._show_step(record)
        else:
            found = losses_text(term_losses(record), record.get("perplexity"))
            self.note(f"step {record['step']}/{self._total}  held out: {found}")

    def show_activity(self, doing: str) -> None:
        """Show what rank 0 is doing in the live line, until the first step. If `doing` is "starting", show the last
        note instead."""
        if not self._steps and doing != self._doing:
            self._beginning.begin_part(self._noted if doing == _STARTING else doing)
        self._doing = doing

    def note(self, text: str) -> None:
        """Print `text` above the live line, which shows the first line of `text`, too, until the first step."""
        self._noted = text.partition("\n")[0]
        self._beginning.begin_part(self._noted)
        (self._bar.console if self._bar else self._console).print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Stop updating and leave the last live line on the screen. It is safe to call this twice."""
        self._alone.close()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_step(self, record: Mapping[str, Any]) -> None:
        for name in _SHOWN_FIELDS & record.keys():
            self._update_mean(name, record[name])
        if not record["skipped"]:
            self._losses = term_losses(record)
            for name, loss in self._losses.items():
                self._update_mean(f"{name} loss", loss)
        done = record["step"] + 1
        if not self._steps:
            self._steps = True
            self._alone.close()
            self._alone.enter_context(silence_progress())
        if self._console.is_terminal:
            self._draw_bar(done)
        elif self._clock() - self._printed_at >= _PLAIN_LINE_INTERVAL_S or done == self._total:
            self._printed_at = self._clock()
            self.note(f"step {done}/{self._total}  {self._figures_text(done)}")

    def _draw_bar(self, steps_done: int) -> None:
        if self._bar is None:
            count = TextColumn("step {task.completed}/{task.total}")
            self._bar = Progress(count, BarColumn(24), TextColumn("{task.description}"), console=self._console)
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=steps_done, description=self._figures_text(steps_done))

    def _figures_text(self, steps_done: int) -> str:
        seconds = max(self._means["seconds"], 1e-9)
        losses = losses_text({name: self._means[f"{name} loss"] for name in self._losses})
        found = ((metric, metric.value_in(self._means)) for metric in metrics_shown_on("progress"))
        said = [metric.value_text(value) for metric, value in found if value is not None]
        ahead = f"ETA {human_duration((self._total - steps_done) * seconds)}"
        return "  ".join(part for part in (losses, *said, ahead) if part)

    def _update_mean(self, name: str, value: float) -> None:
        self._means[name] = running_mean(self._means.get(name), value)


GAUGE_DESCRIPTIONS = {
    "step": "Steps done.",
    "loss": "Training loss of the newest step, per target, in nats, by term.",
    "heldout_loss": "Held-out loss of the newest evaluation, per target, in nats, by term.",
    **{metric.gauge: f"Newest {metric.tile_label()}." for metric in (*STEP_METRICS, *HELD_OUT_METRICS) if metric.gauge},
    "figure": "Further figures of the newest step or evaluation, by their name in its record.",
    "goodput": "Share of the time since this command began that was spent in steps that were not repetitions.",
    "restarts": "Number of times that this command started the ranks again.",
}
_LABEL_BY_GAUGE = {"loss": "term", "heldout_loss": "term", "figure": "figure"}  # Prometheus label of a gauge's values


class Gauges:
    """The Prometheus gauges of a run, which its driver sets. `clock`: monotonic clock in seconds."""

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._retries = StoreRetryGauge()
        self._useful = 0.0  # seconds of all steps, without repetitions
        self._reached = 0  # largest number of steps done
        self._gauges = {
            name: make_gauge(name, text, {"run": run}, *((_LABEL_BY_GAUGE[name],) if name in _LABEL_BY_GAUGE else ()))
            for name, text in GAUGE_DESCRIPTIONS.items()
        }

    def count_start(self, start_count: int) -> None:
        """Set the gauge of restarts: the command has started `start_count` groups of ranks."""
        self._set_gauge("restarts", start_count - 1)

    def record(self, record: Mapping[str, Any]) -> None:
        """Set the gauges from the record of a step or an evaluation. Gauges of fields that it lacks stay unchanged."""
        if record["kind"] == "evaluation":
            self._set_loss_gauges("heldout_loss", record)
            self._set_metric_gauges(HELD_OUT_METRICS, record)
        else:
            self._set_step_gauges(record)
        self._retries.update()

    def _set_step_gauges(self, record: Mapping[str, Any]) -> None:
        done, seconds = record.get("step", -1) + 1, record.get("seconds", 0.0)
        if done > self._reached:
            self._reached, self._useful = done, self._useful + seconds
        self._set_loss_gauges("loss", record)
        self._set_gauge("step", done)
        self._set_metric_gauges(STEP_METRICS, record)
        self._set_gauge("goodput", min(1.0, self._useful / max(self._clock() - self._began, 1e-9)))

    def _set_loss_gauges(self, name: str, record: Mapping[str, Any]) -> None:
        for term, loss in term_losses(record).items():
            self._gauges[name].set(loss, {"term": term})

    def _set_metric_gauges(self, metrics: tuple[Metric, ...], record: Mapping[str, Any]) -> None:
        for metric in metrics_shown_on("gauge", metrics):
            value = metric.value_in(record)
            if value is None:
                continue
            if metric.gauge:
                self._set_gauge(metric.gauge, value)
            else:
                self._gauges["figure"].set(value, {"figure": metric.name})

    def _set_gauge(self, name: str, value: float) -> None:
        self._gauges[name].set(float(value))
