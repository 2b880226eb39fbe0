"""The commands `maskfleet init`, `train`, `show` and `report`: create, train and inspect a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_service.printable import mask_secrets, shell_word
from launcher.app.cli.options import (
    CorpusTokenizerOption,
    RunArgument,
    require_assignments,
    require_corpora,
    require_local_path,
    require_new_run,
    require_recipe,
    require_run,
)
from launcher.app.cli.recipe import RecipeArgument, SetOption, TinyOption, load_recipe
from launcher.progress import work

if TYPE_CHECKING:
    from launcher.runtime.run.record import Run


CorpusOption = Annotated[
    list[str] | None,
    typer.Option(
        "--corpus",
        metavar="[NAME=]URI[@WEIGHT]",
        help="Corpus to train on, instead of the recipe's sources. Repeatable, to mix corpora.",
    ),
]


def init(
    recipe: RecipeArgument,
    run: RunArgument,
    corpora: CorpusOption = None,
    tokenizer: CorpusTokenizerOption = None,
    assignments: SetOption = None,
    tiny: TinyOption = False,
) -> None:
    """Create a run: resolve the recipe, check its corpora, tokenizer and initial weights, and record them.

    `--corpus` sets the recipe's sources, and takes held-out share and tokenizer from the corpora. A URI that holds a
    run already is refused, and so is a recipe that cannot be trained.

    Example: `maskfleet init roberta-base s3://bucket/runs/base --corpus s3://bucket/corpora/news`
    """
    require_recipe(recipe)
    require_assignments(assignments or ())
    require_corpora(corpora or ())
    require_new_run(run)
    from datetime import UTC, datetime

    from launcher.after.tasks.measurable import check_tasks
    from launcher.runtime.rank.kept_start import keep_start
    from launcher.runtime.recipe.schema import SCRATCH, TEACHER
    from launcher.runtime.run.create import create_run
    from launcher.runtime.run.inputs import recipe_sections, refuse_placeholders
    from launcher.runtime.run.readiness import run_warnings

    sections: dict[str, object] = {"tokenizer": {"uri": tokenizer}} if tokenizer else {}
    if corpora:
        sections = recipe_sections(corpora, tokenizer)
    wanted = load_recipe(recipe, assignments, tiny, sections)
    refuse_placeholders(wanted, f"maskfleet init {shell_word(recipe)} {shell_word(run)}")
    wanted = keep_start(wanted, run)
    if wanted.start not in (SCRATCH, TEACHER):
        from launcher.runtime.rank.initial_weights import check_start  # imported late, because it loads torch

        check_start(wanted)
    check_tasks(wanted.evaluation.tasks)
    with work("comparing held-out text", unit="blocks") as now:
        created = create_run(wanted, run, datetime.now(UTC), report=now.advance)
    typer.echo(f"created {created.recipe.name} at {run} ({created.record.fingerprint[:12]})")
    for line in run_warnings(created):
        typer.echo(f"warning: {line}")
    typer.echo(f"next: maskfleet train {shell_word(run)}")


def train(
    run: RunArgument,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Continue with this recipe, which must have the run's identity.")
    ] = None,
    assignments: SetOption = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Accept a change of the run's identity, and record it.")
    ] = False,
    without_removed: Annotated[
        bool,
        typer.Option(
            "--without-removed",
            help="Continue without documents that were removed from a corpus meanwhile, and record the step.",
        ),
    ] = False,
    nodes: Annotated[
        int,
        typer.Option("--nodes", min=1, help="Begin when the Ray cluster in RAY_ADDRESS has this many nodes."),
    ] = 1,
) -> None:
    """Start the run, or continue it from its newest good checkpoint. This is the command that schedulers repeat.

    It never creates a run. Operational settings (ZeRO stage, ranks, workers, intervals) may change at any start:
    `--set zero=2`. A run's identity (data, model, objective, optimizer, seed) may not, unless --accept-changes.

    On SIGTERM, SIGHUP and Ctrl-C it commits a checkpoint first. Exit codes: 0 finished; 3 stopped by `maskfleet runs
    stop`: do not restart; 2 a mistake, or an error that repeating cannot cure; 75 anything else: run it again.
    """
    typer.echo(f"opening {mask_secrets(run)}")  # printed first, because the imports below take seconds
    from rich.console import Console

    if recipe is not None:
        require_recipe(recipe)
    require_assignments(assignments or ())
    require_run(run)
    with work("opening the run"):
        opened = _open_run_with_recipe(run, recipe, tuple(assignments or ()), accept_changes, without_removed)
    with work("loading libraries"):
        from launcher.app.companions import TRAINING_COMPANIONS
        from launcher.runtime.cluster.train import train
    outcome = train(opened, Console(), TRAINING_COMPANIONS, nodes)
    if outcome.step:
        typer.echo(f"{run}: step {outcome.step:,} of {opened.recipe.total_steps:,}")
    raise typer.Exit(outcome.code)


def _open_run_with_recipe(
    uri: str, recipe: str | None, assignments: tuple[str, ...], accept_changes: bool, without_removed: bool
) -> "Run":
    """Open the run at `uri`, and apply the settings that this start changes."""
    from datetime import UTC, datetime

    from launcher.after.tasks.measurable import check_tasks
    from launcher.runtime.recipe.load import load, with_assignments
    from launcher.runtime.run.create import reconcile
    from launcher.runtime.run.record import open_run

    opened = open_run(uri)
    wanted = with_assignments(load(recipe) if recipe else opened.recipe, assignments)
    if wanted.evaluation.tasks != opened.recipe.evaluation.tasks:
        check_tasks(wanted.evaluation.tasks)
    return reconcile(
        opened,
        recipe=wanted,
        accept_changes=accept_changes,
        now=datetime.now(UTC),
        without_removed=without_removed,
    )


def show(
    run: RunArgument,
    step: Annotated[int, typer.Option("--step", min=0, help="Step, counted from 0; past or future.")],
    row: Annotated[int, typer.Option("--row", min=0, help="Row of the step's global batch.")] = 0,
) -> None:
    """Print a sample that a step trained on or will train on: its text, masks and origin.

    No checkpoint is needed: a sample is a function of the run's recipe and its position.
    """
    require_run(run)
    from launcher.observe.inspect.show import find_sample, render_lines
    from launcher.output import console
    from launcher.runtime.run.record import open_run

    sample = find_sample(open_run(run), step, row)
    for line in render_lines(sample):
        console().print(line, highlight=False)


def report(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", callback=require_local_path, help="The HTML file to write.")] = Path(
        "report.html"
    ),
    baselines: Annotated[
        bool, typer.Option(help="Show unigram and bigram losses of the held-out targets; computed once per run.")
    ] = True,
) -> None:
    """Write one HTML page about a run: losses, throughput, data wait, checkpoints, interruptions, recipe.

    The page is self-contained: it has no scripts and no links to other files.
    """
    require_run(run)
    from datetime import UTC, datetime

    from launcher.observe.inspect.report.page import write_report
    from launcher.runtime.run.record import open_run

    opened, new = open_run(run), not out.parent.exists()
    write_report(opened, out, with_baselines=baselines, now=datetime.now(UTC))
    typer.echo(f"wrote {out}{', in a new folder' if new else ''}")
