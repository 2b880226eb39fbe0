"""A measurement as text, and as figures for programs."""

from collections.abc import Iterator
from dataclasses import asdict

from launcher.output import human_bytes, human_count, human_duration
from launcher.plan.measure.measure import MeasuredPhase, MeasuredRecipe, correction

_WHAT, _RESULT = 42, 14  # columns, as in an estimate


def render(report: MeasuredRecipe) -> str:
    """Return the measurement as text, in sections: the machine, each phase, and the whole run."""
    sections = [_title(report)]
    sections += [list(_phase(report, found)) for found in report.phases]
    sections.append(_whole(report))
    return "\n\n".join("\n".join(section) for section in sections)


def figures(report: MeasuredRecipe) -> dict[str, object]:
    """Return seconds, bytes, FLOP/s and shares. `whole_seconds` is one step of the recipe, `seconds` the whole run."""
    return {
        "machine": asdict(report.machine) | {"gpu": report.machine.gpu and report.machine.gpu.name},
        "phases": [_figures(found) for found in report.phases],
        "seconds": report.seconds,
        "estimated_seconds": report.estimated,
    }


def _figures(found: MeasuredPhase) -> dict[str, object]:
    trial, recipe = found.trial, found.trial.recipe
    return {
        "steps": found.phase.steps,
        "length": found.phase.length,
        "rows": found.phase.rows,
        "measured": {
            "microbatch": recipe.microbatch,
            "layers": recipe.model.layers,
            "microbatches": trial.rounds,
            "smaller": list(trial.smaller),
            "steps": found.steps,
        },
        "step_seconds": {"median": found.step.seconds, "low": found.low, "high": found.high},
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "peak_flops": found.peak_flops,
        "memory": {"peak_bytes": found.peak_bytes, "expected_bytes": trial.bytes},
        "parts": dict(_parts(found)),
        "exchange_share": found.exchange,
        "operators": dict(found.operators),
        "whole_seconds": found.whole,
        "estimated_seconds": found.estimated,
    }


def _parts(found: MeasuredPhase) -> list[tuple[str, float]]:
    """Return the parts of a step in seconds, the slowest first."""
    step = found.step
    parts = {
        "waiting for rows": step.data,
        "forward": step.forward,
        "backward": step.backward,
        "optimizer, clipping": step.update,
        "signals, sums, the rest": found.other,
    }
    return sorted(parts.items(), key=lambda part: -part[1])


def _line(what: str, result: str, note: str = "") -> str:
    return f"  {what:<{_WHAT}} {result:>{_RESULT}}  {note}".rstrip()


def _title(report: MeasuredRecipe) -> list[str]:
    machine, recipe = report.machine, report.recipe
    threads = "" if machine.device == "cuda" else f", {machine.threads} thread(s) each"
    lines = [
        f"Measured on this machine: {recipe.name}, {report.parameters:,} parameters, {recipe.precision}, "
        f"ZeRO {recipe.zero}",
        f"{machine.ranks} rank(s){threads}; {machine.name}; synthetic rows",
    ]
    if recipe.model.vocab is None:
        ids = report.phases[0].trial.recipe.model.vocabulary
        lines.append(f"The recipe leaves the vocabulary to the tokenizer: {ids:,} ids are taken.")
    return lines


def _phase(report: MeasuredRecipe, found: MeasuredPhase) -> Iterator[str]:
    machine, trial, step = report.machine, found.trial, found.step
    rows = found.phase.rows
    yield f"Rows of {found.phase.length} ({found.phase.steps:,} steps of {rows:,} rows)"
    if trial.smaller:
        yield f"  Smaller than the recipe, for want of memory or time: {' and '.join(trial.smaller)}."
    yield _line(
        "microbatches of a rank in a step",
        f"{trial.rounds}",
        f"of {trial.recipe.microbatch} rows; the recipe's step has {trial.whole} on {machine.ranks} rank(s)",
    )
    spread = f"median of {found.steps}, {found.low:.4g} to {found.high:.4g}"
    yield _line("a step as measured", f"{step.seconds:.4g} s", spread)
    yield _line(
        "tokens",
        f"{human_count(found.tokens_per_second)}/s",
        f"{step.tokens:,} a step, special ones included",
    )
    if found.mfu is None or found.peak_flops is None:
        yield _line("MFU", "not known", f"no figures for a {machine.name}")
    else:
        peak = f"of {machine.ranks} x {found.peak_flops / 1e12:.4g} TFLOPS (the vendor's)"
        yield _line("MFU", f"{found.mfu:.1%}", peak)
        if machine.gpu is not None:
            ratio = f"{correction(found, machine.gpu):.2f}"
            yield _line(
                "  of what was assumed",
                ratio,
                "by the roofline; what is assumed of other GPUs is multiplied by it",
            )
    expected = f"expected {human_bytes(trial.bytes)}, {found.peak_bytes / max(1, trial.bytes):.0%} of that"
    yield _line("peak memory of a rank", human_bytes(found.peak_bytes), expected)
    for what, seconds in _parts(found):
        yield _line(f"  {what}", f"{seconds:.4g} s", f"{seconds / step.seconds:.0%}")
    if machine.ranks > 1:
        inside = "inside the parts above, waiting for other ranks included"
        yield _line("exchange between ranks", f"{found.exchange:.0%}", inside)
    slowest = ", ".join(f"{name} {share:.0%}" for name, share in found.operators)
    yield _line("slowest operators", "", slowest)


def _whole(report: MeasuredRecipe) -> list[str]:
    lines = ["The recipe on this machine, corrected by what was measured (evaluation and failures apart)"]
    for found in report.phases:
        before = "" if found.estimated is None else f"expected {found.estimated:.4g} s"
        exact = not found.trial.smaller and found.trial.rounds == found.trial.whole
        how = "as measured" if exact else "scaled up by FLOPs and microbatches"
        lines.append(
            _line(f"a step, rows of {found.phase.length}", f"{found.whole:.4g} s", f"{how}; {before}")
        )
    sums = " + ".join(f"{found.phase.steps:,} x {found.whole:.4g} s" for found in report.phases)
    estimated = report.estimated
    before = "" if estimated is None else f"; expected {human_duration(estimated)}"
    lines.append(_line("training", human_duration(report.seconds), f"= {sums}{before}"))
    return lines
