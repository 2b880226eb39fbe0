"""The table of the metrics in a run's records: names, titles, units and formats, which all displays use.

A metric has the same name in records, TensorBoard and trackers. The progress line, `runs status`, the report, the live
page and the Prometheus gauges take titles, units and formats from this table, so a metric that is added here is shown
everywhere. infra/docs/records.md explains the metrics.

Losses are shown for each term (`mlm`, `rtd`, ...): a weighted sum of terms is hard to interpret, and has no perplexity.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from encoder_core.objectives.figures import TERM_FIGURES, TERM_LOSS, TermFigure
from launcher.output import human_count, human_duration

DisplayName = Literal["progress", "status", "tile", "curve", "gauge", "tracker"]
"""In this order: the progress line, `runs status`, tiles and curves of the report, Prometheus; "tracker" is
TensorBoard, W&B and MLflow."""
ALL_DISPLAYS: tuple[DisplayName, ...] = ("progress", "status", "tile", "curve", "gauge", "tracker")

_SMOOTHING = 0.9  # weight of the old mean in the exponential moving average of `running_mean`


def _three_digits(value: float) -> str:
    return f"{value:.3g}"


def _two_digits(value: float) -> str:
    return f"{value:.2g}"


def _percent(value: float) -> str:
    """Return a share as a percentage with three significant digits and at most two decimals."""
    return f"{round(float(f'{100 * value:.3g}'), 2):g}%"


@dataclass(frozen=True)
class Metric:
    """A metric of step records or evaluation records.

    Attributes:
        name: name in records, TensorBoard and trackers.
        title, unit: title and unit of the curve.
        spell: function that formats a value.
        within: template of its text in a line, with {} for the value. Empty: the title and the value.
        gauge: name of its Prometheus gauge. Metrics without one share the gauge `figure`, labelled by `name`.
        ratio: two recorded fields, numerator and denominator, if the metric is not recorded itself, or if its mean must
            be a ratio of sums.
        on: displays that show the metric.
        tone: index of the curve's colour.
    """

    name: str
    title: str
    unit: str = ""
    spell: Callable[[float], str] = _three_digits
    within: str = ""
    gauge: str = ""
    ratio: tuple[str, str] | None = None
    on: tuple[DisplayName, ...] = ALL_DISPLAYS
    tone: int = 1

    @property
    def fields(self) -> tuple[str, ...]:
        """The recorded fields from whose means the mean of this metric is computed."""
        return self.ratio or (self.name,)

    def value_in(self, record: Mapping[str, Any]) -> float | None:
        """Return the value of this metric in a record, or in a dict of means of fields; None if it is absent."""
        value = record.get(self.name)
        if value is None and self.ratio is not None:
            part, whole = (record.get(name) for name in self.ratio)
            value = None if part is None or whole is None else part / max(whole, 1e-9)
        return None if value is None else float(value)

    def value_text(self, value: float) -> str:
        """Return the text of the metric in a line, such as `MFU 31.4%`."""
        return (self.within or f"{self.title.lower()} {{}}").format(self.spell(value))

    def tile_label(self) -> str:
        """Return the label of the metric's tile in the report, such as `throughput, tokens/s`."""
        return f"{self.title.lower()}{self.unit and f', {self.unit}'}"


THROUGHPUT = Metric(
    "tokens_per_second",
    "Throughput",
    "tokens/s",
    human_count,
    "{} tokens/s",
    gauge="tokens_per_second",
    ratio=("tokens", "seconds"),
    on=("progress", "status", "curve", "gauge", "tracker"),  # no "tile": the report has its own, with the median
    tone=3,
)
STEP_METRICS = (
    Metric("lr", "Learning rate", "", _two_digits, gauge="learning_rate", on=("curve", "gauge", "tracker")),
    Metric(
        "grad_norm",
        "Gradient norm",
        "before clipping",
        gauge="gradient_norm",
        on=("curve", "gauge", "tracker"),
        tone=4,
    ),
    THROUGHPUT,
    Metric(
        "seconds",
        "Step time",
        "",
        human_duration,
        "{} a step",
        gauge="step_seconds",
        on=("status", "gauge"),
    ),
    Metric(
        "data_wait_share",
        "Data wait",
        "share of the step, slowest rank",
        _percent,
        gauge="data_wait_share",
        ratio=("data_wait", "seconds"),
        on=("progress", "tile", "curve", "gauge", "tracker"),
        tone=3,
    ),
    Metric(
        "copy_share",
        "Copies in memory",
        "share of the step, rank 0",
        _percent,
        ratio=("copy_seconds", "seconds"),
        on=("curve", "gauge", "tracker"),
        tone=3,
    ),
    Metric("mfu", "Utilisation", "model FLOPs, of the devices' peak", _percent, "MFU {}", gauge="mfu"),
    Metric("generator_grad_norm", "Gradient norm, generator", "before clipping", on=("curve", "gauge"), tone=4),
    Metric(
        "discriminator_grad_norm",
        "Gradient norm, discriminator",
        "before clipping",
        on=("curve", "gauge"),
        tone=4,
    ),
)
"""The metrics of step records, except the losses and figures of each term."""

HELD_OUT_METRICS = (
    Metric("perplexity", "Perplexity", "of hidden tokens", gauge="heldout_perplexity", on=("gauge", "tracker")),
)
"""The metrics of evaluation records, except the losses and figures of each term."""

LOSS = "loss"  # field of a record: the weighted sum of the losses of all terms
BEFORE_PREFIX = "before_"
"""Prefix of the fields of an evaluation record that were measured on the corpus of `evaluation.before`."""

# Endings of the fields of a record that hold a term's loss or another of its figures, such as `mlm_loss`.
_FIGURE_SUFFIXES = tuple(metric.suffix for metric in (TERM_LOSS, *TERM_FIGURES))


def format_figure(figure: TermFigure, value: float) -> str:
    return _percent(value) if figure.share else _three_digits(value)


def metrics_shown_on(display: DisplayName, metrics: tuple[Metric, ...] = STEP_METRICS) -> Iterator[Metric]:
    """Return those of `metrics` that `display` shows, in order."""
    return (metric for metric in metrics if display in metric.on)


def tracker_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a step record (`train/...`) or an evaluation record (`heldout/...`) for TensorBoard and
    other trackers. Values that were not finite are left out."""
    group, metrics = ("heldout", HELD_OUT_METRICS) if record["kind"] == "evaluation" else ("train", STEP_METRICS)
    found = {name: value for name, value in record.items() if name == LOSS or name.endswith(_FIGURE_SUFFIXES)}
    found |= {metric.name: metric.value_in(record) for metric in metrics_shown_on("tracker", metrics)}
    return {f"{group}/{name}": float(value) for name, value in found.items() if value is not None}


def running_mean(mean_so_far: float | None, value: float) -> float:
    """Return the exponential moving average after one more step. It averages over about ten steps.

    Args:
        mean_so_far: the average before this step; None before the first step.
        value: value of the new step.
    """
    return value if mean_so_far is None else _SMOOTHING * mean_so_far + (1 - _SMOOTHING) * value


def term_losses(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the losses of a record in nats, by term (`mlm`, `rtd`, ...); without terms, the whole loss as `loss`.
    Losses that are not finite are left out."""
    suffix = TERM_LOSS.suffix
    terms = {name for name in record if name.endswith(suffix)} - {BEFORE_PREFIX + LOSS}
    named = {name.removesuffix(suffix): value for name, value in record.items() if name in terms}
    named = named or {LOSS: record.get(LOSS)}
    return {name: float(value) for name, value in named.items() if value is not None and math.isfinite(value)}


TOKEN_TERMS = ("plm", "mlm", "clm")
"""Terms that predict masked or next tokens, each target once: their loss has a perplexity, and can be compared with
that of unigram or bigram counts."""


def token_term(figures: Mapping[str, Any]) -> str | None:
    """Return the term that predicts masked or next tokens, to which the record's perplexity belongs; None without
    one."""
    return next((term for term in TOKEN_TERMS if term + TERM_LOSS.suffix in figures), None)


def losses_text(losses: Mapping[str, float], perplexity: float | None = None) -> str:
    """Return losses as text, such as `mlm 4.467 (perplexity 87.13)  rtd 0.340`."""
    token = token_term({name + TERM_LOSS.suffix: loss for name, loss in losses.items()})
    perplexity_by_name = {token: f" (perplexity {perplexity:.2f})"} if token and perplexity is not None else {}
    return "  ".join(f"{name} {loss:.3f}{perplexity_by_name.get(name, '')}" for name, loss in losses.items())
