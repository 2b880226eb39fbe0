"""`maskfleet compare`: trains several recipes under one budget with several seeds, and compares them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.after.compare.arguments import Budget, parse_labelled, settings_of
from launcher.app.cli.one_process import say
from launcher.app.cli.options import (
    CorpusTokenizerOption,
    JsonOption,
    print_json,
    require_assignments,
    require_corpora,
    require_recipe,
)
from launcher.app.cli.recipe import TinyOption, load_recipe
from launcher.app.cli.train import CorpusOption
from launcher.errors import OptionError
from launcher.progress import work

if TYPE_CHECKING:
    from launcher.after.compare.place import Comparison
    from launcher.runtime.recipe.schema import Recipe


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Train")(compare)


RecipesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[LABEL=]RECIPE...",
        help="Bundled recipes' names, or YAML files; the first is what others are held against.",
    ),
]
OutOption = Annotated[str, typer.Option("--out", help="Folder or s3:// URI for the runs and the page.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="tokens=N|flops=N",
        help="Of every run: tokens=8M, flops=2e15. Default: the recipes' own steps.",
    ),
]
SeedsOption = Annotated[int, typer.Option("--seeds", min=1, help="How many: 1, 2, ...")]
PointsOption = Annotated[
    int, typer.Option("--points", min=1, help="Held-out measurements of a run, evenly spaced.")
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="[LABEL:]KEY=VALUE",
        help="Override a value in all recipes, or in one: --set static:objective.mlm.copies=10.",
    ),
]


class Unequal(StrEnum):
    TOKENIZERS = "tokenizers"
    CORPORA = "corpora"
    BUDGETS = "budgets"


AllowOption = Annotated[
    list[Unequal] | None,
    typer.Option("--allow", help="Compare although these differ; repeat it."),
]
OnlyPageOption = Annotated[
    bool, typer.Option("--only-page", help="Train nothing: the page of what is there.")
]


def compare(
    recipes: RecipesArgument = None,
    out: OutOption = "comparison",
    corpora: CorpusOption = None,
    tokenizer: CorpusTokenizerOption = None,
    budget: BudgetOption = None,
    seeds: SeedsOption = 3,
    points: PointsOption = 20,
    assignments: SettingOption = None,
    tiny: TinyOption = False,
    allow: AllowOption = None,
    only_page: OnlyPageOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train recipes on the same documents in the same order, each with several seeds, and write one page about them.

    The page (compare.html, compare.json in --out) has loss curves over tokens and FLOPs, the last checkpoints' figures
    with their spread over seeds, and what was held equal. Every run is an ordinary run in --out/runs; the same command
    goes on where it was, and trains nothing twice. What would make figures incomparable is refused.

    Exit codes: 0 all there; 2 a mistake, or runs that cannot be trained, which the page names; 75 interrupted or
    anything that may pass: give it again.

    Example: `maskfleet compare a.yaml b.yaml --corpus s3://bucket/news --budget tokens=100M --out s3://bucket/a-b`
    """
    from launcher.contract import MISTAKE

    given = None if budget is None else Budget.parse(budget)
    if not only_page:
        _require(recipes or [], corpora or [], assignments or [])
    with work("loading libraries"):
        from launcher.after.compare.place import comparison_at, open_comparison
        from launcher.after.compare.plan import arms_of
        from launcher.after.compare.training import Work

    place, failures = _absolute(out), dict[str, str]()
    with _interruptible() as interrupted:
        if only_page:
            comparison = open_comparison(place)
        else:
            sections = _sections(corpora, tokenizer)
            loaded = _recipes(recipes or [], assignments or [], tiny, sections)
            arms = arms_of(loaded, given, points, [one.value for one in allow or ()])
            comparison = comparison_at(place, arms, range(1, seeds + 1), budget)
            todo = Work(comparison, interrupted)
            for line in todo.done():
                say(line)
            failures = todo.failures
        incomplete = _write(comparison, failures, as_json)
    if failures or (incomplete and not only_page):
        raise typer.Exit(MISTAKE)


def _require(recipes: list[str], corpora: list[str], assignments: list[str]) -> None:
    """Check the arguments before libraries are loaded.

    Raises:
        OptionError, RecipeError, CorpusError: a recipe, corpus or assignment is missing or invalid, or there are
            fewer than two recipes.
    """
    if len(recipes) < 2:
        raise OptionError(
            "a comparison needs at least two recipes", remedy="give two or more: [LABEL=]RECIPE ..."
        )
    for recipe in recipes:
        require_recipe(parse_labelled(recipe)[1])
    require_assignments(assignments)
    require_corpora(corpora)


def _recipes(
    texts: list[str], assignments: list[str], tiny: bool, sections: "dict[str, object]"
) -> "dict[str, Recipe]":
    """Return the recipes by label."""

    named = [parse_labelled(text) for text in texts]
    labels = [label for label, _ in named]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise OptionError(
            f"two recipes are called {repeated[0]}", remedy="give them labels: LABEL=RECIPE LABEL=RECIPE"
        )
    return {
        label: load_recipe(name, settings_of(label, assignments, labels), tiny, sections)
        for label, name in named
    }


def _sections(corpora: list[str] | None, tokenizer: str | None) -> dict[str, object]:
    """Return recipe sections that replace those of all recipes."""
    from launcher.runtime.run.inputs import sections_for

    if corpora:
        return sections_for(corpora, tokenizer)
    return {"tokenizer": {"uri": tokenizer}} if tokenizer else {}


def _write(comparison: "Comparison", failures: dict[str, str], as_json: bool) -> bool:
    """Write the page and its figures, and print the figures. Return whether a run is incomplete."""
    from datetime import UTC, datetime

    from rich.table import Table

    from launcher.after.compare.found import read_found
    from launcher.after.compare.page import dumped, figures_table, record, render
    from launcher.after.compare.place import FIGURES, PAGE
    from launcher.output import print_table

    found = read_found(comparison)
    comparison.store.put(FIGURES, dumped(found, failures).encode())
    comparison.store.put(PAGE, render(found, failures, datetime.now(UTC)).encode())
    if as_json:
        print_json([record(found, failures)])
    else:
        heads, rows = figures_table(found)
        table = Table(*heads, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        print_table(table)
    say(f"wrote {comparison.store.uri.rstrip('/')}/{PAGE}")
    for name, reason in failures.items():
        say(f"failed: {name}: {reason}")
    return len(found.complete) < len(comparison.arms) * len(comparison.seeds)


@contextmanager
def _interruptible() -> Iterator[Event]:
    """Treat SIGTERM and SIGHUP like Ctrl-C: each sets the yielded event, and the command ends with 75."""
    from launcher.contract import REPEAT
    from launcher.signals import heeded

    came = Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.set()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in heeded()}
    try:
        yield came
    except KeyboardInterrupt:
        say("interrupted: the same command goes on")
        raise typer.Exit(REPEAT) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _absolute(uri: str) -> str:
    from pathlib import Path

    return uri if "://" in uri else str(Path(uri).absolute())
