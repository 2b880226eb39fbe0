"""A forecast of failures as text, with its arithmetic, and as JSON for programs."""

from collections.abc import Iterator
from dataclasses import asdict

from launcher.output import human_bytes, human_duration
from launcher.plan.estimate.estimate import Estimate
from launcher.plan.failures.faults import INTERRUPTIONS, NODE_BACK_S, OUTAGES_A_MONTH, UNEXPECTED
from launcher.plan.failures.forecast import MONTHS, Forecast, Outcome, WayForecast
from launcher.plan.failures.recovery import NODE_NOTICED_S, SPARE_BYTES, Standby, noticed, standby
from launcher.runtime.capacity.devices import COPY_RATE

_WHAT, _RESULT, _CELL = 42, 14, 14  # columns
_HINT = 0.002  # share of time lost to fewer ranks that is worth a hint
_NAMES = ("all new", "shared files", "from memory", "survivors stay")


def render(e: Estimate, f: Forecast) -> str:
    """Return the sections of a forecast as text."""
    sections = [_faults(e, f), _ways(f), _months(f), _limits(f)]
    return "\n\n".join("\n".join(section) for section in sections)


def _line(what: str, formula: str, result: str) -> str:
    return f"  {what:<{_WHAT}} {result:>{_RESULT}}  = {formula}".rstrip()


def _row(what: str, cells: Iterator[str]) -> str:
    return f"  {what:<{_WHAT}} " + " ".join(f"{cell:>{_CELL}}" for cell in cells)


def _faults(e: Estimate, f: Forecast) -> list[str]:
    hours = e.cluster.mtbf / 3600
    total = sum(INTERRUPTIONS.values())
    shares = ", ".join(f"{kind} {count}" for kind, count in INTERRUPTIONS.items())
    return [
        "Faults of the cluster",
        _line(
            "a month, planned ones too",
            f"720 h x {e.cluster.nodes:,} nodes / {hours:,.0f} h x {total} / {UNEXPECTED} (Llama 3)",
            f"{720 * e.cluster.nodes / hours * total / UNEXPECTED:,.1f}",
        ),
        _line("in the simulated months", f"mean of {MONTHS}, drawn at random", f"{f.faults:,.1f}"),
        f"  by kind, as in Llama 3's 54 days: {shares}",
        f"  outages of the store: {OUTAGES_A_MONTH:g} a month; a lost node is back after "
        f"{human_duration(NODE_BACK_S)} (assumed)",
    ]


def _ways(f: Forecast) -> list[str]:
    lines = [
        "From a fault to the next step",
        _line(
            "a process that died is noticed",
            "Ray, the driver's look, a heartbeat of the others",
            f"{noticed('rank', 0.0, f.setting.ranks):.2f} s",
        ),
        _line("a machine that is gone", "NCCL's retries over InfiniBand", f"{NODE_NOTICED_S:.0f} s"),
        _line(
            "a hang",
            "the recipe's watchdog.step",
            f"{noticed('hang', f.setting.hang, f.setting.ranks):,.0f} s",
        ),
    ]
    for found in f.ways:
        lines += [f"  {found.way.name}", *_parts(found)]
    return lines


def _parts(found: WayForecast) -> Iterator[str]:
    way = found.way
    for what, formula, seconds in way.anew if way.stay is None else way.stay:
        yield _line(f"  {what}", formula, f"{seconds:.2f} s")
    if way.copies is None:
        yield _line("  checkpoint from the store", "as above", f"{way.load:.2f} s")
    else:
        yield _line(
            "  state from memory",
            f"a rank's part / {COPY_RATE / 1e9:.0f} GB/s, a node's over the network",
            f"{way.recall:.2f} s",
        )
    yield _line("  in all", "the sum", f"{found.restart:.2f} s")


def _months(f: Forecast) -> list[str]:
    lines = [
        f"A month with the same faults, mean of {MONTHS}",
        _row("", iter(_NAMES)),
        _row("goodput, save every " + human_duration(f.ways[0].chosen.interval), _goodput(f, best=False)),
        _row("  steps done twice", (f"{found.chosen.steps:,.0f}" for found in f.ways)),
        _row("best interval between saves", (human_duration(found.at_best.interval) for found in f.ways)),
        *_copies(f),
        _row("goodput there", _goodput(f, best=True)),
        _row("  lowest to highest month", (_range(found.at_best) for found in f.ways)),
    ]
    causes = sorted({cause for found in f.ways for cause in found.at_best.lost})
    for cause in causes:
        shares = [found.at_best.lost.get(cause, 0.0) for found in f.ways]
        if max(shares) >= 5e-6:
            lines.append(_row(f"  lost: {cause}", (f"{share:.3%}" for share in shares)))
    lines += [
        _row("  steps done twice", (f"{found.at_best.steps:,.0f}" for found in f.ways)),
        _row("restarts", (f"{found.at_best.restarts:,.1f}" for found in f.ways)),
        _row("  in which the survivors stay", (f"{found.at_best.stayed:,.1f}" for found in f.ways)),
        _row("  that go back to a commit", (f"{found.at_best.from_store:,.1f}" for found in f.ways)),
    ]
    if any(found.at_best.excluded for found in f.ways):
        lines.append(_row("nodes left out for good", (f"{found.at_best.excluded:,.1f}" for found in f.ways)))
    if any(found.at_best.ended for found in f.ways):
        lines.append(_row("ended by the failure policy", (f"{found.at_best.ended:,.1f}" for found in f.ways)))
    if f.ways[-1].at_best.lost.get("fewer ranks", 0.0) > _HINT:
        lines.append(
            "  Machines to spare lose less here: --set trainers=N, N below the GPUs, and a batch of N x rows."
        )
    return lines


def _goodput(f: Forecast, *, best: bool) -> Iterator[str]:
    return (f"{(found.at_best if best else found.chosen).goodput:.3%}" for found in f.ways)


def _range(outcome: Outcome) -> str:
    return f"{outcome.lowest:.2%}-{outcome.highest:.2%}"


def render_standby(e: Estimate) -> str:
    """Return the section about what a run holds ready for a death."""
    kept = standby(e)
    lines = ["Held ready for a death", *_spares(e, kept)]
    if kept.copies is None:
        return "\n".join([*lines, "  no copies of the state in memory (recovery.memory_every is never)"])
    copies, size = kept.copies, f"{e.checkpoints.bytes / 1e9:.2f} GB"
    every, step = copies.every, f"{kept.step:.4f} s"
    for line in (
        (
            "a copy of the state in memory",
            f"recovery.memory_every: {e.recipe.recovery.memory_every}",
            f"{every:,} steps",
        ),
        (
            "training waits for one",
            f"{size} / {e.cluster.ranks:,} ranks / {COPY_RATE / 1e9:.0f} GB/s (assumed)",
            f"{copies.stall:.5f} s",
        ),
        ("of the time", f"that / ({every:,} x {step})", f"{copies.stall / every / kept.step:.4%}"),
        (
            "of a node's network, to another node",
            f"{size} / {e.cluster.nodes:,} nodes in {every:,} x {step}",
            f"{kept.network:.4%}",
        ),
        ("memory of a node", "its part and another node's, two sets of each", human_bytes(copies.bytes)),
    ):
        lines.append(_line(*line))
    return "\n".join(lines)


def _spares(e: Estimate, kept: Standby) -> Iterator[str]:
    formula = f"{e.recipe.recovery.spares} x {human_bytes(SPARE_BYTES)} (measured)"
    yield _line("spare processes, memory of a node", formula, human_bytes(kept.spares))


def _copies(f: Forecast) -> list[str]:
    found = f.ways[-1]
    if found.way.copies is None or found.best.copies is None:
        return []
    return [
        _row("steps between copies in memory", iter(("", "", *2 * (f"{found.way.copies.every:,}",)))),
        _row("  best for the goodput", iter(("", "", *2 * (f"{found.best.copies.every:,}",)))),
    ]


def _limits(f: Forecast) -> list[str]:
    lines = ["What breaks first"]
    for limit in f.limits:
        ranks = "" if limit.ranks is None else f"; all of it at {limit.ranks:,} ranks"
        lines.append(_line(limit.what, limit.formula + ranks, f"{limit.used:.2%}"))
    return lines


def figures(f: Forecast) -> dict[str, object]:
    """Return every figure of the forecast: seconds, bytes, shares, numbers a month."""
    return {
        "faults": f.faults,
        "months": MONTHS,
        "step": f.step,
        "ways": [
            {
                "name": found.way.name,
                "restart": found.restart,
                "chosen": asdict(found.chosen),
                "best": asdict(found.at_best),
                "copies": None if found.way.copies is None else asdict(found.way.copies),
                "best_copies": None if found.best.copies is None else asdict(found.best.copies),
            }
            for found in f.ways
        ],
        "limits": [asdict(limit) for limit in f.limits],
    }
