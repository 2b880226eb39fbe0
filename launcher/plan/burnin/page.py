"""The page of a burn-in: every check with its result and figures. One HTML file, styled like a run's report."""

from collections.abc import Sequence
from html import escape

from launcher.observe.inspect.report.style import badge, document, header, table, text, tiles
from launcher.plan.burnin.check import Check
from launcher.plan.burnin.record import BurninRecord, Machine, Outcome
from launcher.plan.burnin.report import Measured

_STATES = {
    "passed": "",
    "skipped": " open",
    "left": " open",
    "failed": " bad",
    "died": " bad",
    "late": " bad",
}


def render(record: BurninRecord, checks: Sequence[Check]) -> str:
    """Return the page's HTML. `checks` are those that were asked for; others on record are shown too."""
    machine = record.machine
    found = {} if machine is None else record.of(machine.identity)
    asked = {check.name: check for check in checks}
    names = [*asked, *(name for name in found if name not in asked)]
    body = [
        _header(record, found, names),
        _overview(found, names, asked),
        *(_section(name, found[name], asked.get(name)) for name in names if name in found),
        "" if machine is None else _facts(machine),
    ]
    return document("Burn-in", body)


def _header(record: BurninRecord, found: dict[str, Outcome], names: Sequence[str]) -> str:
    machine = record.machine
    counts = {state: sum(one.status == state for one in found.values()) for state in _STATES}
    counts["left"] = sum(name not in found for name in names)
    device = "" if machine is None else f"{machine.device} ({'GPU' if machine.form == 'gpu' else 'CPU'} form)"
    wrong = counts["failed"] + counts["died"] + counts["late"]
    left = badge(f"{counts['left']} left", " open") if counts["left"] else badge("passed")
    state = badge(f"{wrong} wrong", " bad") if wrong else left
    names_running = ", ".join(record.running)
    running = f"; running, or interrupted: {names_running}" if names_running else ""
    when = f"as of {text(record.updated + running)}"
    shown = tiles((str(count), state) for state, count in counts.items() if count)
    return header("Burn-in", state, text(device), when) + shown


def _overview(found: dict[str, Outcome], names: Sequence[str], asked: dict[str, Check]) -> str:
    rows = [
        [
            name,
            found[name].status if name in found else "left",
            f"{found[name].seconds:.1f}" if name in found else "-",
            asked[name].about if name in asked else "",
            first_line(found[name].why) if name in found else "",
        ]
        for name in names
    ]
    return "<h2>Checks</h2>" + table(("check", "", "seconds", "what it shows", "what went wrong"), rows, 2)


def _section(name: str, outcome: Outcome, check: Check | None) -> str:
    about = "" if check is None else f"<p>{text(check.about)}</p>"
    why = f"<pre>{text(outcome.why)}</pre>" if outcome.why else ""
    lines = table(("what", "found", "may be", ""), map(_row, outcome.lines), 9) if outcome.lines else ""
    state = badge(outcome.status, _STATES[outcome.status])
    where = f'<p class="soft">{text(outcome.device)}, {outcome.began}, {outcome.seconds:.1f} s</p>'
    return f'<h2 id="{escape(name)}">{text(name)} {state}</h2>{about}{where}{why}{lines}'


def _row(line: Measured) -> list[str]:
    bound = (
        ""
        if line.bound is None
        else f"{'at least' if line.least else 'at most'} {spelt(line.bound, line.unit)}"
    )
    verdict = "" if line.right is None else "right" if line.right else "WRONG"
    found = "-" if line.found is None else spelt(line.found, line.unit)
    return [line.what, found, bound, verdict]


def spelt(found: float | str, unit: str) -> str:
    """Return a figure with four digits and its unit."""
    if isinstance(found, str):
        return found
    size = abs(found)
    digits = f"{found:,.0f}" if size >= 1e4 or found == int(found) else f"{found:.4g}"
    return f"{digits} {unit}".strip()


def _facts(machine: Machine) -> str:
    return "<h2>Machine</h2>" + table(("what", "found"), machine.facts.items(), 2)


def first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
