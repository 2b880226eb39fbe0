"""The overviews' claims as comparisons of small runs; started again, it goes on.

    python tests/bench/claims.py WORKDIR --text PATH... [--probe TASK] [--row NAME...] [--budget tokens=4M] [--seeds 3]

`claims.yaml` beside this file says what is compared. Each row is a `maskfleet compare` in WORKDIR/NAME, on one corpus
and one tokenizer that are made of the text. The page, WORKDIR/CLAIMS.md, has the figures as they were found; it is
written anew after each row. On two quiet cores a run takes minutes and all rows a night.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml
from program import BenchError, note, run
from pydantic import BaseModel, ConfigDict

_REPEAT = 75


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Compared(_Part):
    """A bundled recipe, and settings of its small form."""

    recipe: str
    settings: list[str] = []


class Row(_Part):
    """A claim, where it is made, and the recipes that try it. `budget`: in place of everybody's; `settings`: of all the
    row's recipes, before their own."""

    claim: str
    source: str
    settings: list[str] = []
    recipes: dict[str, Compared]
    budget: str | None = None


class Claims(_Part):
    """See claims.yaml."""

    vocabulary: int
    lowercase: bool
    heldout: float
    budget: str
    seeds: int
    points: int
    settings: list[str]
    rows: dict[str, Row]


def main(
    workdir: Path,
    text: Annotated[list[str], typer.Option("--text", help="Files and folders of text.")],
    probe: Annotated[
        str | None, typer.Option("--probe", help="A classification task, for linear probes.")
    ] = None,
    rows: Annotated[list[str] | None, typer.Option("--row", help="Only this one; repeat it.")] = None,
    budget: Annotated[str | None, typer.Option("--budget", help="In place of all of the file's.")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="In place of the file's.")] = None,
) -> None:
    claims = Claims.model_validate(yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text("utf-8")))
    chosen = {name: row for name, row in claims.rows.items() if not rows or name in rows}
    corpus = _corpus(workdir.absolute(), text, claims)
    settings = [*claims.settings]
    if probe is not None:
        settings.append(f"evaluation.tasks={json.dumps([{'probe': {'task': probe}}])}")
    for name, row in chosen.items():
        note(f"{name}: {row.claim}")
        wanted = budget or row.budget or claims.budget
        _compare(
            workdir / name,
            row,
            corpus,
            [*settings, *row.settings],
            ["--budget", wanted, "--seeds", str(seeds or claims.seeds), "--points", str(claims.points)],
        )
        (workdir / "CLAIMS.md").write_text(page(claims, workdir), "utf-8")
    print((workdir / "CLAIMS.md").read_text("utf-8"))


def _corpus(workdir: Path, text: Sequence[str], claims: Claims) -> Path:
    """The corpus and its tokenizer; what is there already stays."""
    tokenizer, corpus, ready = workdir / "tokenizer", workdir / "corpus", workdir / "ready"
    if not ready.exists():
        lower = ["--lowercase", "--strip-marks"] if claims.lowercase else []
        size = ["--kind", "wordpiece", "--vocab-size", str(claims.vocabulary)]
        again = (
            ["--replace"] if tokenizer.exists() else []
        )  # a former start ended before its corpus was there
        _maskfleet("tokenizer", "train", *text, *size, *lower, *again, "--out", str(tokenizer))
        held = ["--heldout", str(claims.heldout)]
        _maskfleet("corpus", "build", *text, "--tokenizer", str(tokenizer), *held, "--out", str(corpus))
        ready.touch()
    return corpus


def _compare(out: Path, row: Row, corpus: Path, settings: Sequence[str], options: Sequence[str]) -> None:
    arms = [f"{label}={one.recipe}" for label, one in row.recipes.items()]
    own = [f"{label}:{setting}" for label, one in row.recipes.items() for setting in one.settings]
    given = [part for setting in (*settings, *own) for part in ("--set", setting)]
    _maskfleet("compare", *arms, "--tiny", "--corpus", str(corpus), "--out", str(out), *options, *given)


def _maskfleet(*arguments: str) -> None:
    code = subprocess.run([sys.executable, "-P", "-m", "maskfleet", *arguments], check=False).returncode
    if code == _REPEAT:
        sys.exit(_REPEAT)
    if code:
        raise BenchError(f"maskfleet {' '.join(arguments[:2])} ended with {code}", remedy="see what it said")


def page(claims: Claims, workdir: Path) -> str:
    """What was found, in Markdown; rows that were not run are named."""
    lines = ["# What was claimed, and what small runs say", ""]
    for name, row in claims.rows.items():
        found = workdir / name / "compare.json"
        lines += [f"## {row.claim}", "", f"{row.source}.", ""]
        lines += _table(json.loads(found.read_text("utf-8"))) if found.exists() else ["Not run."]
        lines.append("")
    return "\n".join(lines) + "\n"


def _table(record: Mapping[str, object]) -> Iterator[str]:
    recipes = record["recipes"]
    assert isinstance(recipes, dict)
    names = list(dict.fromkeys(name for one in recipes.values() for name in one["figures"]))
    equal = ", ".join(line["what"] for line in record["held"] if line["equal"])  # type: ignore[attr-defined]
    unequal = ", ".join(line["what"] for line in record["held"] if not line["equal"])  # type: ignore[attr-defined]
    yield f"Budget {record['budget']}. Equal: {equal}. Not equal: {unequal}."
    yield ""
    yield f"| recipe | runs | {' | '.join(names)} |"
    yield "|---" * (len(names) + 2) + "|"
    alike: list[str] = []
    for label, one in recipes.items():
        runs = sum(run["complete"] for run in one["runs"].values())
        yield f"| {label} | {runs} | {' | '.join(_spelt(one['figures'][name]) for name in names)} |"
        against = [figure for figure in one["against"].values() if figure is not None]
        same = bool(against) and all(figure["low"] == figure["high"] == 0 for figure in against)
        alike += [label] if same else []
        if against:
            yield f"| {label} less the first | | {' | '.join(_spelt(one['against'][name]) for name in names)} |"
    if alike:  # as static masks within the first reading of a text
        yield ""
        yield f"To the last digit as the first: {', '.join(alike)}. Take a budget at which they differ."


def _spelt(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return "-"
    span = f" ({figure['low']:.4g} to {figure['high']:.4g})" if figure["n"] > 1 else ""
    return f"{figure['mean']:.4g}{span}"


if __name__ == "__main__":
    run(main)
