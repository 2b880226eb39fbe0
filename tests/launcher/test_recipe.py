"""Recipes: bundled ones are complete and published; mistakes are named by place, value and remedy."""

from pathlib import Path

import pytest
import yaml

from launcher.errors import RecipeError
from launcher.recipe import Recipe, bundled, load, loads, reload
from launcher.recipe_summary import parameters, tokens_per_step
from launcher.tiny import tiny

NAMES = ["quickstart", "roberta-base", "roberta-large-160gb"]


def mistake(name: str, *assignments: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load(name, assignments)
    return caught.value


def test_all_bundled_recipes_are_known() -> None:
    assert list(bundled()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_resolved_recipe_reads_back_as_itself(name: str) -> None:
    recipe = load(name)
    assert loads(recipe.to_yaml(), "again") == recipe
    assert loads(tiny(recipe).to_yaml(), "again") == tiny(recipe)


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_recipe_writes_out_every_key(name: str) -> None:
    """What is left to defaults is only what another key implies: a union's tag, the tokenizer's padding id, what
    belongs to another unit of masking."""
    implied = {"model.pad_id", "objective.mlm.kind", "objective.mlm.count", "objective.mlm.max_predictions"}
    implied |= {"objective.mlm.longest", "objective.mlm.span_p", "objective.mlm.replace.random_from"}
    implied |= {"objective.plm.kind", "schedule.power", "schedule.floor"}

    def keys(data: object, prefix: str = "") -> set[str]:
        if not isinstance(data, dict):
            return set()
        return {f"{prefix}{key}" for key in data} | {
            path for key, value in data.items() for path in keys(value, f"{prefix}{key}.")
        }

    written = yaml.safe_load(bundled()[name])
    assert keys(load(name).to_data()) - keys(written) <= implied


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "lr", "warmup", "count"),
    [
        ("roberta-base", 12, 768, 6e-4, 24_000, 124_696_665),
        ("roberta-large-160gb", 24, 1024, 4e-4, 30_000, 355_411_033),
    ],
)
def test_published_settings(name: str, layers: int, hidden: int, lr: float, warmup: int, count: int) -> None:
    """Liu et al. 2019, table 9, with the released models' batch and steps; parameters without the unused token type."""
    recipe = load(name)
    adam = recipe.optimizer.adamw
    assert adam is not None
    assert (recipe.model.layers, recipe.model.hidden) == (layers, hidden)
    assert (adam.lr, adam.betas, adam.eps, adam.weight_decay, adam.clip) == (
        lr,
        (0.9, 0.98),
        1e-6,
        0.01,
        None,
    )
    assert (recipe.schedule.warmup, recipe.schedule.decay, recipe.total_steps) == (warmup, "linear", 500_000)
    assert tokens_per_step(recipe.phases[0]) == 8192 * 512
    assert parameters(recipe) == count


@pytest.mark.parametrize("name", NAMES)
def test_tiny_keeps_the_kind_of_run_and_fits_a_cpu(name: str) -> None:
    recipe, small = load(name), tiny(load(name))
    assert (
        parameters(small.model_copy(update={"model": small.model.model_copy(update={"vocab": 500})}))
        < 200_000
    )
    assert small.total_steps <= 6 * len(recipe.phases)
    assert (small.precision, small.zero) == ("fp32", recipe.zero)
    assert (small.objective, small.optimizer, small.input) == (
        recipe.objective,
        recipe.optimizer,
        recipe.input,
    )


def test_overrides_adjust_a_tiny_recipe() -> None:
    assert reload(tiny(load("roberta-base")), ("phases.0.steps=2",)).total_steps == 2


@pytest.mark.parametrize(
    ("assignment", "problem", "remedy"),
    [
        ("model.layrs=3", "--set model.layrs is not a key", "did you mean layers?"),
        ("optimizer.adamw.beta1=0.9", "--set optimizer.adamw.beta1 is not a key", "betas"),
        ("phases.0.batch.rows=8", "--set phases.0.batch.rows is not a key", "sequences"),
        ("model.layers='12'", '--set model.layers = "12": input should be a valid integer', "model.layers"),
        ("seed=true", "--set seed = true", "correct seed"),
        ("zero=5", "--set zero = 5: input should be 0, 1, 2 or 3", "correct zero"),
        ("precision=fp16", '--set precision = "fp16"', "correct precision"),
        ("optimizer.lamb={lr: 0.1}", "choose exactly one optimizer", "correct optimizer"),
        ("phases.0.batch.tokens=4096", "exactly one of the two", "correct phases.0.batch"),
        ("objective.mlm.replace.mask=0.9", "mask + random + keep is 1.1", "correct objective.mlm.replace"),
        ("data_service.memory=lots", '--set data_service.memory = "lots"', "correct data_service.memory"),
        ("corpus.sources={}", "--set corpus.sources", "correct corpus.sources"),
        ("phases.7.steps=1", "phases has no 7", "an existing key"),
        (
            "objective.mlm.copies=x",
            "copies = \"x\": input should be 'dynamic', or input should be a valid",
            "copies",
        ),
        ("nonsense", "'nonsense' is not an assignment", "--set a.b=value"),
        ("model={a: [}", "not valid YAML", "quote it"),
    ],
)
def test_a_mistake_names_its_place_value_and_remedy(assignment: str, problem: str, remedy: str) -> None:
    error = mistake("roberta-base", assignment)
    assert problem in error.problem
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("assignments", "problem", "remedy"),
    [
        (
            ("phases.0.batch.sequences=100",),
            "100 rows does not divide into microbatches of 64",
            "multiple of 64",
        ),
        (("phases.0.length=1024",), "rows of 1024 tokens exceed the model's max_length of 512", "max_length"),
        (("schedule.warmup=500001",), "a warmup of 500,001 steps is longer", "shorten the warmup"),
        (("zero=0",), "bf16 at ZeRO stage 0", "zero: 1"),
        (("model.heads=7",), "heads (7)", "correct model"),
        (("phases.0.batch={tokens: 100}",), "100 tokens cannot hold one row of 512", "at least 512"),
        (("corpus.heldout.fraction=0",), "evaluation needs held-out documents", "above 0"),
        (
            ("corpus.sources.more={uri: b, weight: 2}",),
            "some sources have a weight and others auto",
            "every source",
        ),
    ],
)
def test_impossible_combinations_are_refused(assignments: tuple[str, ...], problem: str, remedy: str) -> None:
    error = mistake("roberta-base", *assignments)
    assert problem in error.problem
    assert remedy in error.remedy


def test_all_mistakes_are_reported_at_once() -> None:
    error = mistake("roberta-base", "zero=0", "phases.0.length=1024", "schedule.warmup=500001")
    assert len(error.problem.splitlines()) == 3


def test_a_mistake_in_a_file_has_its_line(tmp_path: Path) -> None:
    text = bundled()["roberta-base"]
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("  hidden: 768", "  hiden: 768"))
    line = text.splitlines().index("  hidden: 768") + 1
    error = mistake(str(path))
    assert f"{path}:{line}: model.hiden is not a key" in error.problem
    assert "model.hidden is missing" in error.problem
    assert "did you mean hidden?" in error.remedy


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("seed: 1 ", "seed: 1\nseed: 2"), "seed is given twice"),
        (("phases:  ", "phases: ]"), "not valid YAML: line"),
        (("name: roberta-base", "name: [a, b]"), "name: input should be a valid string"),
    ],
)
def test_broken_files(tmp_path: Path, change: tuple[str, str], problem: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(bundled()["roberta-base"].replace(*change))
    assert problem in mistake(str(path)).problem


def test_a_recipe_that_is_not_there_lists_those_that_are() -> None:
    error = mistake("roberta-bse")
    assert "there is no recipe 'roberta-bse'" in error.problem
    assert all(name in error.remedy for name in NAMES)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert "not a mapping" in mistake(str(tmp_path / "list.yaml")).problem
    assert "not UTF-8" in mistake(str(tmp_path / "latin.yaml")).problem


def test_numbers_may_be_written_as_people_write_them() -> None:
    assert _lr(load("roberta-base", ("optimizer.adamw.lr=6e-4",))) == 6e-4
    assert _lr(load("roberta-base", ("optimizer.adamw.lr=1",))) == 1.0


def _lr(recipe: Recipe) -> float:
    assert recipe.optimizer.adamw is not None
    return recipe.optimizer.adamw.lr
