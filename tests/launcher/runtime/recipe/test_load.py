"""Recipes: mistakes are named by place, value and remedy. The bundled ones: test_library.py."""

import random
from pathlib import Path

import pytest

from launcher.errors import RecipeError
from launcher.runtime.policies.elastic import Trainers
from launcher.runtime.recipe.load import load, with_assignments
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.source import bundled
from launcher.runtime.recipe.tiny import tiny


def mistake(name: str, *assignments: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load(name, assignments)
    return caught.value


def test_overrides_adjust_a_tiny_recipe() -> None:
    adjusted = with_assignments(tiny(load("roberta-base")), ("phases.0.steps=2", "schedule.warmup=1"))
    assert (adjusted.total_steps, adjusted.model.layers) == (2, 2)


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("model.layrs=3", "--set model.layrs is not a key"),
        ("optimizer.adamw.beta1=0.9", "--set optimizer.adamw.beta1 is not a key"),
        ("phases.0.batch.rows=8", "--set phases.0.batch.rows is not a key"),
        ("model.layers='12'", '--set model.layers = "12": input should be a valid integer'),
        ("seed=true", "--set seed = true"),
        ("seed=010", '--set seed = "010"'),
        ("seed=1:30", '--set seed = "1:30"'),
        ("phases.².steps=3", "phases has no '²'"),
        (
            "phases=[{steps: 90, length: 9, batch: {sequences: 9}, weights: {mlm: {start: 1, end: 0, steps: 5}}},"
            " {steps: 9, length: 9, batch: {sequences: 9}}]",
            "all terms have weight 0 in step 89",
        ),
        ("zero=5", "--set zero = 5: input should be 0, 1, 2 or 3"),
        ("precision=fp16", '--set precision = "fp16"'),
        ("optimizer.lamb={lr: 0.1}", "choose exactly one optimizer"),
        ("optimizer.muon={lr: 0.1}", "choose exactly one optimizer"),
        ("optimizer={muon: {lr: 0.1, betas: [0.9, 1.0]}}", "optimizer.muon.betas.1"),
        ("phases.0.batch.tokens=4096", "exactly one of the two"),
        ("objective.mlm.replace.mask=0.9", "mask + random + keep is 1.1"),
        ("data_service.memory=lots", '--set data_service.memory = "lots"'),
        ("corpus.sources={}", "--set corpus.sources"),
        ("phases.7.steps=1", "phases has no 7"),
        ("objective.mlm.copies=x", "copies = \"x\": input should be 'dynamic', or input should be a valid"),
        ("nonsense", "'nonsense' is not an assignment"),
        ("model={a: [}", "not valid YAML"),
    ],
)
def test_a_mistake_names_its_place_value_and_remedy(assignment: str, problem: str) -> None:
    error = mistake("roberta-base", assignment)
    assert problem in error.problem
    assert error.remedy


@pytest.mark.parametrize(
    ("assignments", "problem"),
    [
        (("phases.0.batch.sequences=100",), "100 rows does not divide into microbatches of 64"),
        (("phases.0.microbatch=48",), "8192 rows does not divide into microbatches of 48"),
        (("phases.0.length=1024",), "rows of 1024 tokens exceed the model's max_length of 512"),
        (("schedule.warmup=500001",), "a warmup of 500,001 steps is longer"),
        (("zero=0",), "bf16 at ZeRO stage 0"),
        (("precision=fp32", "reduce_dtype=bf16"), "sum fp32 gradients in bf16"),
        (("model.heads=7",), "heads (7)"),
        (("phases.0.batch={tokens: 100}",), "100 tokens cannot hold one row of 512"),
        (("corpus.heldout.fraction=0",), "evaluation needs held-out documents"),
        (("corpus.sources.more={uri: b, weight: 2}",), "some sources have a weight and others auto"),
    ],
)
def test_impossible_combinations_are_refused(assignments: tuple[str, ...], problem: str) -> None:
    error = mistake("roberta-base", *assignments)
    assert problem in error.problem
    assert error.remedy


def test_all_mistakes_are_reported_at_once() -> None:
    error = mistake("roberta-base", "zero=0", "phases.0.length=1024", "schedule.warmup=500001")
    assert len(error.problem.splitlines()) == 3


def test_a_mistake_in_a_file_has_its_line(tmp_path: Path) -> None:
    text = bundled()["roberta-base"]
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("  hidden: 768", "  hiden: 768"))
    line = text.splitlines().index("  hidden: 768") + 1
    error = mistake(str(path))
    assert f"{path}:{line}: model.hiden " in error.problem
    assert "model.hidden " in error.problem
    assert " hidden?" in error.remedy


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("seed: 1 ", "seed: 1\nseed: 2"), "seed is given twice"),
        (("phases:  ", "phases: ]"), "not valid YAML: line"),
        (("name: roberta-base", "name: [a, b]"), "name: input should be a valid string"),
    ],
)
def test_a_broken_recipe_names_the_problem(tmp_path: Path, change: tuple[str, str], problem: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(bundled()["roberta-base"].replace(*change))
    assert problem in mistake(str(path)).problem


def test_a_recipe_that_is_not_there_lists_those_that_are() -> None:
    error = mistake("roberta-bse")
    assert " recipe 'roberta-bse'" in error.problem
    assert all(name in error.remedy for name in bundled())


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert "mapping" in mistake(str(tmp_path / "list.yaml")).problem
    assert "not UTF-8" in mistake(str(tmp_path / "latin.yaml")).problem


def test_numbers_may_be_written_as_people_write_them() -> None:
    assert _lr(load("roberta-base", ("optimizer.adamw.lr=6e-4",))) == 6e-4
    assert _lr(load("roberta-base", ("optimizer.adamw.lr=1",))) == 1.0


def _lr(recipe: Recipe) -> float:
    assert recipe.optimizer.adamw is not None
    return recipe.optimizer.adamw.lr


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)

HOSTILE = {
    "an alias bomb": (BOMB, "values, aliases expanded"),
    "an alias in itself": ("a: &a [1, *a]", "inside the value that it stands for"),
    "a merge of itself": ("a: &a\n  b: {<<: *a}", "inside the value that it stands for"),
    "deep lists": ("a: " + "[" * 5000, "nested deeper"),
    "deep mappings": ("".join(" " * n + "a:\n" for n in range(200)), "nested deeper"),
    "a number too long to read": ("seed: " + "9" * 10_000, "not valid YAML"),
    "a set": ("name: !!set {a}", "not JSON serializable"),
    "a tag that does not fit": ("name: !!int x", "not valid YAML"),
    "a tag for objects": ("name: !!python/object/apply:os.getcwd []", "not valid YAML"),
    "a key that is a list": ("? [a]\n: 1", "not valid YAML"),
    "a time that is none": ("name: !!timestamp x", "not valid YAML"),
    "infinity as a count": ("seed: .inf", "seed"),
    "a key of two escapes, which is one character": (
        r'"\ud83d\ude00": 1',
        "mine.yaml:1: \U0001f600 is not a key",
    ),
    "a key that is a number": ("7: 1", "mine.yaml:1: 7 is not a key"),
    "a key that is a truth": ("yes: 1", "yes is not a key"),
    "half of a character": (r'name: "\ud83d"', "not valid YAML"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_yaml_is_a_recipe_error(kind: str, tmp_path: Path) -> None:
    text, problem = HOSTILE[kind]
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(RecipeError, match=problem):
        load(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("names", [("no", "off"), ("no", "yes"), ("010", "8"), ("1:30", "~"), ("2026-11-29", "1e3")])
def test_names_are_what_is_written(names: tuple[str, str], tmp_path: Path) -> None:
    """YAML 1.1 takes some for truths, numbers and days, by which one source would replace the other."""
    sources = ", ".join(f"{name}: {{uri: /{number}}}" for number, name in enumerate(names))
    path = tmp_path / "mine.yaml"
    path.write_text(load("roberta-base", (f"corpus.sources={{{sources}}}",)).to_yaml() + "name: 2026-11-29\n")
    path.write_text(path.read_text().replace("name: roberta-base\n", ""))
    for recipe in (load(str(path)), load("roberta-base", (f"corpus.sources={{{sources}}}",))):
        assert {name: source.uri for name, source in recipe.corpus.sources.items()} == {
            name: f"/{number}" for number, name in enumerate(names)
        }
    assert load(str(path), (f"corpus.sources.{names[0]}.uri=/c",)).corpus.sources[names[0]].uri == "/c"


@pytest.mark.parametrize(
    "settings",
    [
        ("trainers={min: 4, max: 16}",),
        ("trainers={min: 9}",),
        ("objective={mlm: {}, contrastive: {}}", "input={packing: contiguous}"),
    ],
)
@pytest.mark.parametrize("name", ["roberta-base", "modernbert-base"])
def test_what_can_be_trained_can_be_shrunk(name: str, settings: tuple[str, ...]) -> None:
    recipe = load(name, settings)
    small = tiny(recipe)
    assert small.objective.terms.keys() == recipe.objective.terms.keys()
    assert isinstance(small.trainers, Trainers) == isinstance(recipe.trainers, Trainers)


def leaves(data: object, path: tuple[str, ...] = ()) -> list[str]:
    """The dotted path of every value of a recipe that is no mapping and no list."""
    if isinstance(data, dict | list):
        items = data.items() if isinstance(data, dict) else enumerate(data)
        return [leaf for key, value in items for leaf in leaves(value, (*path, str(key)))]
    return [".".join(path)]


OPTIONAL = (
    "phases.0.mixture={weights: {books_wiki: %s}}",
    "phases.0.mixture={weights: {books_wiki: auto}, most_readings: %s}",
    "phases.0.mlm={rate: {start: 0.3, end: %s}}",
    "phases.0.lr=%s",
    "phases.0.weights={mlm: {start: %s, end: 1}}",
    "average={ema: %s}",
    "checkpoint.every={minutes: %s}",
    "mixing.translations=%s",
)


@pytest.mark.parametrize("seed", range(5))
def test_no_setting_takes_a_number_that_is_not_finite(seed: int) -> None:
    """Every value of a recipe in turn, and settings that its YAML leaves out."""
    drawn = random.Random(seed)
    name = ("roberta-base", *drawn.sample(sorted(bundled()), 4))[seed]
    recipe = load(name)
    numbers = [".inf", "-.inf", ".nan", "1e999", "9" * 400]
    for leaf in leaves(recipe.to_data()):
        with pytest.raises(RecipeError) as caught:
            with_assignments(recipe, (f"{leaf}={drawn.choice(numbers)}",))
        assert caught.value.problem.startswith(f"--set {leaf}: ")
        assert leaf in caught.value.remedy
    for setting in OPTIONAL:
        assert setting.partition("=")[0] in mistake("roberta-base", setting % drawn.choice(numbers)).problem


@pytest.mark.parametrize("setting", ["corpus.sources.books_wiki.weight=%s", OPTIONAL[0]])
def test_no_sum_of_weights_overflows(setting: str) -> None:
    assert load("roberta-base", (setting % "1e18",))
    for number in ("2e18", "1e308"):
        assert ".weight" in mistake("roberta-base", setting % number).problem


@pytest.mark.parametrize("value", ["[" * 5000, "&a [*a]", "9" * 10_000])
def test_hostile_values_are_recipe_errors(value: str) -> None:
    assert "--set" in mistake("roberta-base", f"seed={value}").problem
