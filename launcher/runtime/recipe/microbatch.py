"""Numbers in the place of `microbatch: auto`, once it is known how many rows memory permits.

The batch is shared out evenly: as few rounds as memory permits, and all ranks' microbatches about equally large.
"""

from collections.abc import Sequence

from launcher.runtime.recipe.schema import Recipe, RecipePhase


def has_automatic(recipe: Recipe) -> bool:
    """Whether memory decides on the microbatches of some phase."""
    return any(map(recipe.is_automatic, recipe.phases))


def settled(recipe: Recipe, ranks: int, most: Sequence[int] | None = None) -> Recipe:
    """`recipe` with the rows of a microbatch of `ranks` ranks where memory decides, at most `most` in each phase.

    None: no bound; each rank takes its part of a step at once.
    """
    bounds = most or [phase.rows for phase in recipe.phases]
    phases = (
        phase.model_copy(update={"microbatch": _even(recipe, phase, ranks, bound)})
        if recipe.is_automatic(phase)
        else phase
        for phase, bound in zip(recipe.phases, bounds, strict=True)
    )
    return recipe.model_copy(update={"phases": tuple(phases)})


def _even(recipe: Recipe, phase: RecipePhase, ranks: int, most: int) -> int:
    rounds = -(-phase.rows // (ranks * most))
    rows = -(-phase.rows // (ranks * rounds))
    # Memory of earlier tokens is carried by microbatches of equally many rows.
    if recipe.memory_refresh is not None:
        rows = max(size for size in range(1, rows + 1) if phase.rows % size == 0)
    return rows
