"""`tests/bench/compare.py`: each row differs in what it says, at its budget; a small row from text to page."""

import json
from pathlib import Path

import compare
import pytest

from launcher.runtime.recipe.identity import changed_paths, identity_fields
from launcher.runtime.recipe.timeline import tokens_before
from launcher.runtime.run.history import read_history
from launcher.runtime.run.record import open_run

FILE = compare.read_comparisons()
DIFFER = {
    "masks": {"objective"},
    "sentences": {"objective", "input"},
    "spans": {"objective"},
    "detection": {"objective", "model", "phases", "optimizer", "schedule"},
    "words": {"objective"},
    "rate": {"objective"},
    "causal": {"objective", "phases"},
    "annealed": {"objective", "phases"},
}


@pytest.mark.parametrize("name", FILE.rows)
def test_a_row_takes_its_budget_and_differs_in_what_it_says(name: str) -> None:
    row = FILE.rows[name]
    found = []
    for one in row.recipes.values():
        budget = one.tokens or row.tokens or FILE.tokens
        found.append(compare.recipe_of(one, (*FILE.settings, *row.settings), budget, ()))
        assert tokens_before(found[-1], found[-1].total_steps) == pytest.approx(budget, rel=0.01)
    if name in DIFFER:
        differing = {
            path.split(".")[0]
            for other in found[1:]
            for path in changed_paths(identity_fields(found[0]), identity_fields(other))
        }
        assert "objective" in differing
        assert differing <= DIFFER[name]


@pytest.mark.long
@pytest.mark.cluster
def test_a_row_from_text_to_page_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, work = tmp_path / "text.txt", tmp_path / "work"
    text.write_text("".join(f"line {n} says what line {n * n % 97} said before it\n\n" for n in range(900)))
    arms = {"static": FILE.rows["masks"].recipes["static"], "dynamic": FILE.rows["masks"].recipes["dynamic"]}
    row = FILE.rows["masks"].model_copy(update={"recipes": arms})
    small = FILE.model_copy(
        update={"vocabulary": 120, "tokens": 4096, "heldout": 0.1, "seeds": 1, "rows": {"masks": row}}
    )
    monkeypatch.setattr(compare, "read_comparisons", lambda: small)
    compare.main(work, [str(text)])
    kept = {label: json.loads((work / f"masks/{label}-1.json").read_text()) for label in arms}
    own = read_history(open_run(str(work / "masks/dynamic-1")).store).evaluations[-1]
    assert kept["dynamic"]["figures"]["mlm_loss"] == own["mlm_loss"]
    first = kept["static"]["figures"]
    assert first["common mlm_loss"] == pytest.approx(first["mlm_loss"], rel=1e-4)
    assert kept["dynamic"]["changed"] == ["objective.mlm.copies"]
    monkeypatch.setattr(compare, "maskfleet", lambda *arguments: pytest.fail(f"repeated {arguments}"))
    compare.main(work, [str(text)])
