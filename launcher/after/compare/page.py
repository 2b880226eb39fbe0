"""The page of a comparison: figures with their spread over seeds, curves, what was held equal. One HTML file, and the
same for programs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

from launcher.after.compare.arguments import Unit
from launcher.after.compare.equality import differences, held
from launcher.after.compare.found import ComparisonState, FoundRun, Spread
from launcher.after.compare.plan import Arm
from launcher.observe.inspect.report.chart import TONES, Chart, Series, draw
from launcher.observe.inspect.report.style import document, header, table, text
from launcher.output import human_count
from launcher.runtime.run.log import encode

UNITS: tuple[Unit, ...] = ("tokens", "flops")
_NAMES = {"tokens": "tokens", "flops": "FLOPs"}


def render(found: ComparisonState, failures: Mapping[str, str], now: datetime) -> str:
    """Return the page's HTML. `failures`: of runs that cannot go on or be measured, by name."""
    first = found.comparison.arms[0].label
    body = [
        _header(found, now),
        _missing(found, failures),
        "<h2>Figures</h2>" + _note(first) + table(*figures_table(found), 1),
        f"<h2>Against {text(first)}</h2>" + _AGAINST + table(*_against(found), 1),
        "<h2>Curves</h2>" + _CURVES + f'<div class="charts">{"".join(map(draw, charts(found)))}</div>',
        "<h2>Held equal</h2>" + _held(found),
        *_differences(found),
    ]
    return document(" / ".join(_labels(found)), body)


_AGAINST = (
    '<p class="soft">Differences seed by seed: runs of one seed read the same documents, so what is common to them '
    "cancels. Where the lowest and the highest difference have one sign, every seed agrees.</p>"
)
_CURVES = '<p class="soft">Lines: means over the seeds that are there; bands: the extremes.</p>'


def _note(first: str) -> str:
    return (
        '<p class="soft">Means over seeds, and in brackets the extremes. Figures called common are of hidden tokens on '
        f"the held-out rows and under the masks of {text(first)}, the same for all. The others are under each "
        "recipe's own masks: where these differ, so does what is asked.</p>"
    )


def figures_table(found: ComparisonState) -> tuple[list[str], list[list[str]]]:
    """Return the heads of the table, and a row for each arm: number of complete runs, then every figure."""
    names = found.figures
    rows = [
        [label, f"{sum(one.complete for one in found.runs[label].values())} of {len(found.comparison.seeds)}"]
        + [spelt(found.spread(label, name)) for name in names]
        for label in _labels(found)
    ]
    return ["recipe", "complete runs", *names], rows


def spelt(spread: Spread | None) -> str:
    """Return mean and range as text, `4.233 (4.201 to 4.260)`; `-` if there is no figure."""
    if spread is None:
        return "-"
    if len(spread.values) == 1:
        return f"{spread.mean:.4g}"
    return f"{spread.mean:.4g} ({spread.low:.4g} to {spread.high:.4g})"


def charts(found: ComparisonState) -> Iterator[Chart]:
    """Yield the charts of each loss, held-out and training, over tokens and over FLOPs."""
    for name in found.losses:
        for kind in ("held out", "training"):
            for unit in UNITS:
                yield _chart(found, name, kind, unit)


def record(found: ComparisonState, failures: Mapping[str, str]) -> dict[str, object]:
    """Return the content of the page for programs; infra/docs/records.md describes the keys."""
    first = found.comparison.arms[0]
    return {
        "seeds": list(found.comparison.seeds),
        "budget": found.comparison.budget,
        "recipes": {arm.label: _arm_record(found, arm.label) for arm in found.comparison.arms},
        "held": [{"what": line.what, "equal": line.equal, "how": line.how} for line in held(found)],
        "differences": {arm.label: differences(first, arm) for arm in found.comparison.arms[1:]},
        "failures": dict(failures),
    }


def dumped(found: ComparisonState, failures: Mapping[str, str]) -> str:
    """Return the record as strict JSON."""
    return json.dumps(json.loads(encode(record(found, failures))), indent=1) + "\n"


def _arm_record(found: ComparisonState, label: str) -> dict[str, object]:
    first, arm = found.comparison.arms[0].label, _arm(found, label)
    total, cost = arm.recipe.total_steps, arm.cost
    return {
        "tokens": cost.tokens(total),
        "flops": cost.flops(total),
        "steps": total,
        "runs": {
            str(seed): {
                "uri": one.run.uri,
                "step": one.step,
                "complete": one.complete,
                "figures": dict(one.figures),
            }
            for seed, one in found.runs[label].items()
        },
        "figures": {name: _spread_record(found.spread(label, name)) for name in found.figures},
        "against": {name: _spread_record(_less(found, label, first, name)) for name in found.figures},
        "curves": {name: _curve_record(found, label, name) for name in found.losses},
    }


def _curve_record(found: ComparisonState, label: str, name: str) -> dict[str, object]:
    arm = _arm(found, label)
    along = {unit: found.curve(arm, lambda one: one.held_out(name), unit) for unit in UNITS}
    curve = along["tokens"]
    return {
        **{unit: along[unit].x.tolist() for unit in UNITS},
        "mean": curve.mean.tolist(),
        "low": curve.low.tolist(),
        "high": curve.high.tolist(),
    }


def _spread_record(spread: Spread | None) -> dict[str, object] | None:
    if spread is None:
        return None
    return {"n": len(spread.values), "mean": spread.mean, "low": spread.low, "high": spread.high}


def _chart(found: ComparisonState, name: str, kind: str, unit: Unit) -> Chart:
    def points(one: FoundRun) -> dict[int, float]:
        return one.held_out(name) if kind == "held out" else one.trained(name)

    arms = found.comparison.arms
    series = []
    for number, arm in enumerate(arms):
        curve = found.curve(arm, points, unit)
        band = {"low": curve.low, "high": curve.high} if kind == "held out" else {}
        series.append(
            Series(arm.label, curve.x, curve.mean, number % TONES + 1, dots=kind == "held out", **band)
        )
    end = max(arm.cost.of(unit, arm.recipe.total_steps) for arm in arms)
    term = name.removesuffix("_loss").replace("_", " ").upper()
    return Chart(
        f"{term} loss, {kind}",
        f"nats per target, over {_NAMES[unit]}",
        tuple(series),
        x_end=end,
        x_name=_NAMES[unit],
        x_format=partial(_scaled, unit),
    )


def _scaled(unit: Unit, value: float) -> str:
    return human_count(value) if unit == "tokens" else f"{value:.2g}"


def _against(found: ComparisonState) -> tuple[list[str], list[list[str]]]:
    first, *others = _labels(found)
    names = found.figures
    rows = [[label, *(spelt(_less(found, label, first, name)) for name in names)] for label in others]
    return ["recipe", *names], rows


def _less(found: ComparisonState, label: str, first: str, name: str) -> Spread | None:
    own, its = found.spread(label, name), found.spread(first, name)
    return None if own is None or its is None or label == first else own.less(its)


def _header(found: ComparisonState, now: datetime) -> str:
    comparison = found.comparison
    budget = "the recipes' own" if comparison.budget is None else comparison.budget
    when = now.astimezone(UTC).isoformat(timespec="seconds")
    seeds = ", ".join(map(str, comparison.seeds))
    what = f"budget: {text(budget)}; seeds {seeds}; page of {when}"
    return header(" / ".join(_labels(found)), "", f"<code>{text(comparison.store.uri)}</code>", what)


def _missing(found: ComparisonState, failures: Mapping[str, str]) -> str:
    """Return the HTML of the runs that are not complete, and of their failures."""
    open_runs = [
        f"{label}-{seed}"
        for label, runs in found.runs.items()
        for seed in found.comparison.seeds
        if seed not in runs or not runs[seed].complete
    ]
    lines = [f"Not complete: {', '.join(open_runs)}."] if open_runs else []
    lines += [f"{name}: {reason}" for name, reason in failures.items()]
    return "".join(f"<p>{text(line)}</p>" for line in lines)


def _held(found: ComparisonState) -> str:
    rows = [(line.what, "yes" if line.equal else "no", line.how) for line in held(found)]
    return table(("what", "equal", "how"), rows, 3)


def _differences(found: ComparisonState) -> Iterator[str]:
    first, *others = found.comparison.arms
    for arm in others:
        lines = "\n".join(differences(first, arm)) or "nothing that decides a result"
        summary = f"<summary>{text(first.label)} to {text(arm.label)}, field by field</summary>"
        yield f"<details>{summary}<pre>{text(lines)}</pre></details>"


def _arm(found: ComparisonState, label: str) -> Arm:
    return next(arm for arm in found.comparison.arms if arm.label == label)


def _labels(found: ComparisonState) -> Sequence[str]:
    return [arm.label for arm in found.comparison.arms]
