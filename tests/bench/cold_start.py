"""From `maskfleet train` to the end of its first step, by part, with a warm file cache and with a cold one.

    python tests/bench/cold_start.py WORK --against CHECKOUT --environment VENV

A start's parts are on record (`underway`). Checkouts take turns, so that a machine whose speed drifts is fair to both.
For a cold start the files of the environment, of the checkout and of Python's own library are dropped from the cache.
Linux drops files that no process has mapped: give `--environment` a copy of a virtual environment that nothing else
uses.
"""

import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from program import BenchError, note, run

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "phases=[{steps: 2, length: 32, batch: {sequences: 12}}]",
    "trainers=2",
    "zero=2",
    "schedule.warmup=0",
)
_COMMAND = "from launcher.app.cli.main import main; main()"
_FRESH = """
import sys
from pathlib import Path
from tests.support.runs import small_runs

work, name, *settings = sys.argv[1:]
small_runs.prepare_corpus(Path(work), documents=300)
small_runs.new_run(Path(work), name, *settings)
"""


@dataclass(frozen=True)
class Start:
    """One start.

    Attributes:
        parts: seconds by part: those of the driver, then those of rank 0. What no part counts is `not counted`: Ray
            unpickles a rank's arguments, with what they import, before the rank begins.
        total: seconds from the command to the end of the first step.
    """

    parts: dict[str, float]
    total: float


def bench_starts(
    work: Path,
    checkouts: Sequence[Path],
    environment: Path,
    *,
    cold: bool,
    rounds: int,
    progress: Callable[[str], None],
) -> dict[Path, list[Start]]:
    """Start a fresh run `rounds` times by each checkout, in turn."""
    model = fresh_run(work, checkouts[0], environment)
    found: dict[Path, list[Start]] = {checkout: [] for checkout in checkouts}
    for number in range(rounds):
        for checkout in checkouts if number % 2 == 0 else reversed(checkouts):
            uri = work / "run"
            shutil.rmtree(uri, ignore_errors=True)
            shutil.copytree(model, uri)
            if cold:
                drop([environment, checkout, Path(sysconfig.get_path("stdlib"))])
            found[checkout].append(start(uri, checkout, environment))
            progress(f"{checkout}: {found[checkout][-1].total:.1f} s")
    return found


def fresh_run(work: Path, earliest: Path, environment: Path) -> Path:
    """A run of a small form that has not begun, over a corpus of our own text.

    The earliest code makes it: later code reads the runs of earlier code, which rejects keys that it does not know.
    """
    uri = work / "fresh"
    if not uri.exists():
        work.mkdir(parents=True, exist_ok=True)
        command = [str(environment / "bin/python"), "-c", _FRESH, str(work), uri.name, *SETTINGS]
        subprocess.run(command, env=_variables(earliest), check=True, cwd=earliest)
    return uri


def start(uri: Path, checkout: Path, environment: Path) -> Start:
    """Train the run at `uri` with the code of `checkout`."""
    command = [str(environment / "bin/python"), "-c", _COMMAND, "train", str(uri)]
    began = time.time()
    done = subprocess.run(
        command, env=_variables(checkout), capture_output=True, text=True, check=False, cwd=checkout
    )
    if done.returncode != 0:
        raise BenchError(f"the run failed: {done.stdout}{done.stderr}", remedy="train it by hand")
    return start_of(underway(uri), began)


def _variables(checkout: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}


def underway(uri: Path) -> dict[str, Any]:
    from launcher.runtime.run.history import read_history
    from launcher.runtime.run.record import open_run

    events = read_history(open_run(str(uri)).store).events
    return dict(next(event for event in events if event["kind"] == "underway"))


def start_of(event: dict[str, Any], began: float) -> Start:
    parts, total = {**event["driver"], **event["seconds"]}, event["time"] - began
    return Start({**parts, "not counted": total - sum(parts.values())}, total)


def drop(folders: Sequence[Path]) -> None:
    """Drop the files below `folders` from the cache; those that a process has mapped stay."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def render(warm: dict[Path, list[Start]], cold: dict[Path, list[Start]]) -> str:
    """Return a table of medians by part, a row a checkout and cache, with the extremes of the whole."""
    parts = list(
        dict.fromkeys(
            part for found in (*warm.values(), *cold.values()) for one in found for part in one.parts
        )
    )
    lines = [f"| cache | checkout | {' | '.join(parts)} | in all |", "|---" * (len(parts) + 3) + "|"]
    for cache, by_checkout in (("warm", warm), ("cold", cold)):
        for checkout, found in by_checkout.items():
            cells = [f"{statistics.median(one.parts.get(part, 0.0) for one in found):.1f}" for part in parts]
            totals = [one.total for one in found]
            whole = f"{statistics.median(totals):.1f} ({min(totals):.1f} to {max(totals):.1f})"
            lines.append(f"| {cache} | {checkout.name} | {' | '.join(cells)} | {whole} |")
    return "\n".join(lines)


def main(
    work: Annotated[Path, typer.Argument(help="A folder for the corpus and the runs.")],
    against: Annotated[Path | None, typer.Option(help="A checkout of an earlier commit.")] = None,
    environment: Annotated[Path, typer.Option(help="The virtual environment whose Python runs both.")] = Path(
        sys.prefix
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Starts of each checkout with a warm cache.")] = 5,
    cold_rounds: Annotated[int, typer.Option(min=0, help="The same with a cold cache.")] = 3,
) -> None:
    checkouts = [*([against.resolve()] if against else []), ROOT]
    settings: dict[str, Any] = {"progress": note}
    bench_starts(work, checkouts, environment, cold=False, rounds=1, progress=note)  # it warms the cache
    warm = bench_starts(work, checkouts, environment, cold=False, rounds=rounds, **settings)
    cold = bench_starts(work, checkouts, environment, cold=True, rounds=cold_rounds, **settings)
    typer.echo(render(warm, cold))


if __name__ == "__main__":
    run(main)
