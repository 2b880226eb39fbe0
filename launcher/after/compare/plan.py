"""The plan of a comparison (recipes by label, seeds, a budget), and the check that its result would mean something."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from launcher.after.compare.arguments import Budget
from launcher.after.compare.budget import Cost, within
from launcher.errors import CompareError, OptionError
from launcher.output import human_count
from launcher.runtime.recipe.corpora import corpora_of
from launcher.runtime.recipe.load import reload
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.create import absolute
from launcher.runtime.run.inputs import Inputs, read_inputs, refuse_placeholders

Unequal = Literal["tokenizers", "corpora", "budgets"]
_EQUAL = 0.01  # budgets differ by at most this share; one that was asked for by a step, since steps are whole


@dataclass(frozen=True)
class Arm:
    """One of the compared recipes, in the form that its runs have, except for the seed.

    Attributes:
        label: name of the recipe in the comparison.
        vocabulary: number of ids of its tokenizer.
    """

    label: str
    recipe: Recipe
    inputs: Inputs
    vocabulary: int

    @property
    def cost(self) -> Cost:
        return Cost(self.recipe, self.vocabulary)

    def seeded(self, seed: int) -> Recipe:
        """Return the recipe of one of its runs."""
        return self.recipe.model_copy(update={"seed": seed, "name": f"{self.label}-{seed}"})


def arms_of(
    recipes: Mapping[str, Recipe], budget: Budget | None, points: int, allowed: Sequence[str]
) -> list[Arm]:
    """Return the recipes at the budget, each measured `points` times on held-out text, evenly spaced.

    Args:
        budget: tokens or FLOPs of each run; None: those of the recipes, which must be equal.
        allowed: conditions that may differ, although figures are then not comparable.

    Raises:
        CompareError: if the recipes differ in a condition that makes figures incomparable.
        OptionError, RecipeError, CorpusError, TokenizerError, StoreError: as `within` and `init`.
    """
    if len(recipes) < 2:
        raise OptionError("one recipe is no comparison", remedy="give two or more: [LABEL=]RECIPE ...")
    arms = [_arm(label, recipe, budget, points) for label, recipe in recipes.items()]
    problems = {kind: text for kind, text in _unequal(arms, budget).items() if kind not in allowed}
    if problems:
        raise CompareError(
            "\n".join(problems.values()),
            remedy="; ".join(f"{_REMEDIES[kind]}, or --allow {kind}" for kind in problems),
        )
    return arms


_REMEDIES: dict[Unequal, str] = {
    "tokenizers": "give all one --tokenizer and a --corpus built with it",
    "corpora": "give all the same --corpus",
    "budgets": "give all one --budget, as tokens=8M",
}


def _arm(label: str, recipe: Recipe, budget: Budget | None, points: int) -> Arm:
    refuse_placeholders(recipe, "maskfleet compare RECIPE... --out FOLDER")
    tokenizer = load_tokenizer(recipe.tokenizer.uri)
    wanted = recipe if budget is None else within(recipe, budget, tokenizer.vocab_size)
    every = {"steps": max(1, wanted.total_steps // points)}
    wanted = absolute(reload(wanted, (f"evaluation.every={every}",)))
    return arm_of(label, wanted, tokenizer)


def arm_of(label: str, recipe: Recipe, tokenizer: Tokenizer | None = None) -> Arm:
    """Return the arm of a complete recipe. Raises the errors of `init`."""
    tokenizer = tokenizer or load_tokenizer(recipe.tokenizer.uri)
    return Arm(label, recipe, read_inputs(recipe, tokenizer), tokenizer.vocab_size)


def _unequal(arms: Sequence[Arm], budget: Budget | None) -> dict[Unequal, str]:
    """Return what differs that figures depend on, each with the values."""
    found: dict[Unequal, str] = {}
    if _differ(arm.inputs.tokenizer for arm in arms):
        listed = _listed(arms, [arm.inputs.tokenizer[:12] for arm in arms])
        found["tokenizers"] = f"the tokenizers differ, so a loss is not of the same tokens: {listed}"
    if _differ(_texts(arm) for arm in arms):
        listed = _listed(arms, [", ".join(print_[:12] for print_, _ in _texts(arm)) for arm in arms])
        found["corpora"] = f"the corpora or their weights differ, so the runs read other text: {listed}"
    unit = "tokens" if budget is None else budget.unit
    amounts = [arm.cost.of(unit, arm.recipe.total_steps) for arm in arms]
    rounded = 0.0 if budget is None else max(arm.cost.last_step(unit) for arm in arms)
    if max(amounts) - min(amounts) > max(rounded, _EQUAL * min(amounts)):
        listed = _listed(arms, [human_count(amount) for amount in amounts])
        found["budgets"] = f"the runs take unequal {unit}: {listed}"
    return found


def _texts(arm: Arm) -> list[tuple[str, object]]:
    """Return content and weight of the corpora, those of phases too, without their names."""
    corpora = corpora_of(arm.recipe)
    return sorted((arm.inputs.corpora[name], str(source.weight)) for name, source in corpora.items())


def _differ(values: Iterable[object]) -> bool:
    first, *others = values
    return any(value != first for value in others)


def _listed(arms: Sequence[Arm], values: Sequence[str]) -> str:
    return "; ".join(f"{arm.label} {value}" for arm, value in zip(arms, values, strict=True))
