"""A forecast of failures as text, with its arithmetic, and as JSON for programs."""

from collections.abc import Iterator
from dataclasses import asdict

from launcher.format import human_bytes, human_duration
from launcher.plan.estimate.estimate import Estimate
from launcher.plan.failures.faults import INTERRUPTIONS, OUTAGES_A_MONTH, UNEXPECTED
from launcher.plan.failures.forecast import MONTHS, Forecast, Outcome, WayForecast
from launcher.plan.failures.machines import NODE_BACK_S
from launcher.plan.failures.recovery import NODE_NOTICED_S, NOTICED_S, noticed
from launcher.runtime.capacity.devices import COPY_RATE

_WHAT, _RESULT, _CELL = 42, 14, 14  # columns
_HINT = 0.002  # share of time lost to fewer ranks that is worth a hint
_NAMES = ("all new", "shared files", "survivors stay")


def render(e: Estimate, f: Forecast) -> str:
    """Return the sections of a forecast as text."""
    sections = [_faults(e, f), _ways(f), _months(f), _copies(f), _limits(f)]
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
            "a process that died is noticed", "Ray, the driver's look, the others' reports", f"{NOTICED_S} s"
        ),
        _line("a machine that is gone", "NCCL's retries over InfiniBand", f"{NODE_NOTICED_S:.0f} s"),
        _line(
            "a hang",
            "the recipe's watchdog.step",
            f"{noticed('hang', f.setting.hang):,.0f} s",
        ),
    ]
    for found in f.ways:
        lines += [f"  {found.way.name}", *_parts(found)]
    return lines


def _parts(found: WayForecast) -> Iterator[str]:
    way = found.way
    for what, formula, seconds in way.anew if way.stay is None else way.stay:
        yield _line(f"  {what}", formula, f"{seconds:.2f} s")
    if way.stay is None:
        yield _line("  checkpoint from the store", "as above", f"{way.load:.2f} s")
    elif way.copies is not None:
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


def _copies(f: Forecast) -> list[str]:
    chosen, best = f.ways[-1].way.copies, f.ways[-1].best.copies
    if chosen is None or best is None:
        return ["Copies of the state in memory: none"]
    return [
        "Copies of the state in memory",
        _line("every", "what steps (1 %) and the network (10 %) bear", f"{chosen.every:,} steps"),
        _line("training waits for one", "a rank's part, to its host", f"{chosen.stall:.5f} s"),
        _line(
            "of a step",
            f"stall / ({chosen.every:,} x {f.step:.4f} s)",
            f"{chosen.stall / chosen.every / f.step:.4%}",
        ),
        _line(
            "best for the goodput", "sqrt(2 x stall x M), and what the network bears", f"{best.every:,} steps"
        ),
        _line("memory of a node", "its part and another node's, two sets of each", human_bytes(chosen.bytes)),
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
