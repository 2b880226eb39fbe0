"""A key of a phase that a scratch copy of the packages has: `dropout` (tests/architecture/test_habits.py)."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from checkpoints.listing import committed
from launcher.app.cli.recipe_timeline import print_timeline, timeline_records
from launcher.errors import RecipeError
from launcher.runtime.recipe.load import load
from launcher.runtime.run.fork import fork
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs


def use() -> None:
    """Train without it and with it; what shows a run or changes it knows of it."""
    root = Path("inputs").absolute()
    root.mkdir()
    small_runs.prepare_corpus(root)
    short = ("phases.0.steps=3", "phases.1.steps=2")
    without = finish(small_runs.new_run(root, "without", *short), 1)
    having = finish(small_runs.new_run(root, "having", *short, "phases.1.dropout=0"), 1)
    first, second = small_runs.losses(without), small_runs.losses(having)
    assert first[:3] == second[:3]
    assert first[3] != second[3]

    recipe = open_run(having).recipe
    assert {(at["phase"], at["dropout"]) for at in timeline_records(recipe)} == {(0, 0.1), (1, 0.0)}
    print_timeline(recipe)

    step = committed(open_run(without).store)[0].step
    forked = fork(
        open_run(without),
        str(root / "fork"),
        step,
        ("phases.1.dropout=0", "phases.1.steps=9"),
        now=datetime.now(UTC),
        keep_position=False,
    )
    assert "- phases.1.dropout: (absent) -> 0.0" in forked.changes
    assert not forked.restarted
    with pytest.raises(RecipeError, match=r"phases\.0\.dropout: only mlm has it"):
        load("xlnet-base", ("phases.0.dropout=0",))
