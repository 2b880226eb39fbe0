"""What is compared, and what would make a comparison mean nothing."""

from pathlib import Path

import pytest

from launcher.after.compare.arguments import Budget, parse_labelled, settings_of
from launcher.after.compare.plan import arms_of
from launcher.errors import CompareError, OptionError
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from tests.support.runs.small_runs import SETTINGS, SMALL, prepare_corpus


def small(folder: Path, *settings: str) -> Recipe:
    places = (f"corpus.sources.text.uri={folder}/corpus", f"tokenizer.uri={folder}/tokenizer")
    return load(SMALL, (*places, *SETTINGS, *settings))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of other documents, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("others")
    prepare_corpus(folder, documents=40)
    return folder


def test_labels_and_settings() -> None:
    assert parse_labelled("static=roberta-base") == ("static", "roberta-base")
    assert parse_labelled("some/where/mine.yaml") == ("mine", "some/where/mine.yaml")
    given = ["seed=1", "a:objective.mlm={rate: 0.3}", "b:zero=2", "name=x:y"]
    assert settings_of("a", given, ["a", "b"]) == ["seed=1", "objective.mlm={rate: 0.3}", "name=x:y"]
    assert settings_of("b", given, ["a", "b"]) == ["seed=1", "zero=2", "name=x:y"]
    with pytest.raises(OptionError, match=r"\bc\b"):
        settings_of("a", ["c:zero=1"], ["a", "b"])
    with pytest.raises(OptionError, match="label"):
        parse_labelled("some/-odd name")


def test_one_recipe_is_no_comparison(inputs: Path) -> None:
    with pytest.raises(OptionError, match="comparison"):
        arms_of({"a": small(inputs)}, None, 2, ())


def test_a_budget_and_points_are_everybodys(inputs: Path) -> None:
    recipes = {
        "a": small(inputs),
        "b": small(inputs, "phases=[{steps: 9, length: 64, batch: {sequences: 4}}]"),
    }
    arms = arms_of(recipes, Budget("tokens", 12_800), 4, ())
    assert [arm.cost.tokens(arm.recipe.total_steps) for arm in arms] == pytest.approx([12_800] * 2, rel=0.03)
    assert [arm.recipe.evaluation.every.steps for arm in arms] == [
        max(1, arm.recipe.total_steps // 4) for arm in arms
    ]
    assert arms[0].seeded(7).seed == 7


@pytest.mark.parametrize("kind", ["budgets", "corpora", "tokenizers"])
def test_what_makes_figures_incomparable_is_refused_unless_allowed(
    inputs: Path, others: Path, kind: str
) -> None:
    other = {
        "budgets": small(inputs, "phases.0.steps=9"),
        "corpora": small(inputs, f"corpus.sources.more={{uri: {inputs}/corpus}}"),
        "tokenizers": small(others),
    }[kind]
    recipes = {"a": small(inputs), "b": other}
    with pytest.raises(CompareError) as caught:
        arms_of(recipes, None, 2, ())
    assert f"--allow {kind}" in caught.value.remedy
    allowed = [kind] if kind != "tokenizers" else ["tokenizers", "corpora"]
    assert [arm.label for arm in arms_of(recipes, None, 2, allowed)] == ["a", "b"]


def test_where_a_corpus_lies_and_what_it_is_called_does_not_matter(inputs: Path) -> None:
    renamed = small(inputs, f"corpus.sources={{other: {{uri: {inputs}/corpus}}}}")
    assert len(arms_of({"a": small(inputs), "b": renamed}, None, 2, ())) == 2
