"""Every recipe of claims.yaml can be trained, within its row's budget, and its row differs in what it says."""

import json
import re
from pathlib import Path

import claims
import pytest
import yaml

from launcher.after.compare.arguments import Budget
from launcher.after.compare.budget import Cost, within
from launcher.runtime.recipe.identity import changed, identity
from launcher.runtime.recipe.load import load, reload
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.tiny import tiny

FILE = claims.Claims.model_validate(
    yaml.safe_load(Path(claims.__file__).with_name("claims.yaml").read_text())
)
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


def recipes(row: claims.Row) -> list[Recipe]:
    budget = Budget.parse(row.budget or FILE.budget)
    everybody = (*FILE.settings, *row.settings)
    small = [reload(tiny(load(one.recipe)), (*everybody, *one.settings)) for one in row.recipes.values()]
    return [within(recipe, budget, FILE.vocabulary) for recipe in small]


@pytest.mark.parametrize("name", FILE.rows)
def test_a_row_is_a_comparison(name: str) -> None:
    first, *others = found = recipes(FILE.rows[name])
    budget = Budget.parse(FILE.rows[name].budget or FILE.budget)
    taken = [Cost(recipe, FILE.vocabulary).of(budget.unit, recipe.total_steps) for recipe in found]
    assert taken == pytest.approx([budget.amount] * len(found), rel=0.01)
    differing = {path.split(".")[0] for other in others for path in changed(identity(first), identity(other))}
    assert differing <= DIFFER[name]
    assert "objective" in differing


def test_the_page_says_what_was_found_and_what_was_not_run(tmp_path: Path) -> None:
    (tmp_path / "rate").mkdir()
    figure = {"n": 2, "mean": 5.25, "low": 5.0, "high": 5.5}
    first = {
        "figures": {"mlm_loss": figure},
        "against": {"mlm_loss": None},
        "runs": {"1": {"complete": True}},
    }
    less = {"n": 2, "mean": -0.25, "low": -0.5, "high": 0.125}
    record = {
        "budget": "tokens=64k",
        "held": [{"what": "documents", "equal": True}, {"what": "what is predicted", "equal": False}],
        "recipes": {"fifteen": first, "thirty": first | {"against": {"mlm_loss": less}}},
    }
    (tmp_path / "rate" / "compare.json").write_text(json.dumps(record))
    page = claims.page(FILE, tmp_path)
    assert re.search(r"-0\.25 \(-0\.5 to 0\.125\)", page)
    assert re.search(r"\bEqual: documents\..*: what", page)
    assert page.count("Not run.") == len(FILE.rows) - 1


@pytest.mark.long
def test_a_start_that_ended_before_its_corpus_goes_on(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} says what line {n * n % 97} said before it\n\n" for n in range(400)))
    small = FILE.model_copy(update={"vocabulary": 120})
    corpus = claims._corpus(tmp_path / "work", [str(text)], small)
    (tmp_path / "work" / "ready").unlink()
    (corpus / "manifest.json").unlink()
    assert claims._corpus(tmp_path / "work", [str(text)], small) == corpus
    assert (corpus / "manifest.json").exists()


def test_the_page_says_where_recipes_did_the_same(tmp_path: Path) -> None:
    """As static masks, within the first reading of a text, and dynamic ones."""
    (tmp_path / "masks").mkdir()
    figure, none = ({"n": 3, "mean": mean, "low": mean, "high": mean} for mean in (5.0, 0.0))
    one = {"figures": {"mlm_loss": figure}, "against": {"mlm_loss": None}, "runs": {}}
    record = {
        "budget": "tokens=64k",
        "held": [],
        "recipes": {"static": one, "dynamic": one | {"against": {"mlm_loss": none}}},
    }
    (tmp_path / "masks" / "compare.json").write_text(json.dumps(record))
    assert ": dynamic." in claims.page(FILE, tmp_path)
