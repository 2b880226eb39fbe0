"""A phase of a recipe in the size in which a machine trains it on synthetic rows."""

from dataclasses import dataclass

from data_service.samples.pairs import Translations
from encoder_core.families.catalogue import language_table
from launcher.plan.measure.rows import HELDOUT
from launcher.runtime.recipe.schema import Heldout, Recipe, RecipeCorpus, RecipeSource, TokenizerRef


@dataclass(frozen=True)
class Trial:
    """A phase of a recipe in the size in which it is measured.

    Attributes:
        recipe: a recipe of this one phase for this machine's ranks; `at` gives it a corpus and a tokenizer.
        rounds: number of microbatches of a rank in a measured step.
        whole: number of microbatches of a rank in the recipe's own step on as many ranks.
        smaller: what was made smaller, in words; empty if microbatch and model are the recipe's.
        bytes: memory that a rank is expected to fill.
        seconds: expected time of a step; None if the device's peak is unknown.
    """

    recipe: Recipe
    rounds: int
    whole: int
    smaller: tuple[str, ...]
    bytes: int
    seconds: float | None

    @property
    def _languages(self) -> tuple[str, ...]:
        """Languages of the one synthetic source: two for translations, else the model's first if it has languages."""
        pairs = isinstance(self.recipe.input, Translations)
        known = language_table(self.recipe.model) or (("first", "second") if pairs else ())
        return known[: 2 if pairs else 1]

    def at(self, corpus: str, tokenizer: str) -> Recipe:
        """Return the recipe with this corpus and this tokenizer."""
        sources = RecipeCorpus(
            sources={"synthetic": RecipeSource(uri=corpus, languages=self._languages)},
            heldout=Heldout(fraction=HELDOUT),
        )
        mixing = self.recipe.mixing.model_copy(update={"translations": None})
        objective = self.recipe.objective
        if objective.distil is not None:  # ranks make random ones of the same shapes
            teachers = tuple(
                source.model_copy(update={"uri": f"{corpus}/no-teacher"})
                for source in objective.distil.teachers
            )
            distil = objective.distil.model_copy(update={"teachers": teachers})
            objective = objective.model_copy(update={"distil": distil})
        changes = {
            "objective": objective,
            "corpus": sources,
            "mixing": mixing,
            "tokenizer": TokenizerRef(uri=tokenizer),
        }
        return self.recipe.model_copy(update=changes)
