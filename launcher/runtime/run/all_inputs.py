"""All inputs of a run with their identities, its teachers included. Only a run that distils loads torch for it."""

from data_service.tokenizers.tokenizer import Tokenizer
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.inputs import Inputs, read_inputs
from launcher.runtime.run.record import Run


def read_all_inputs(recipe: Recipe, tokenizer: Tokenizer, past: Run | None = None) -> Inputs:
    """Return what `read_inputs` returns, with the identities of the teachers. Raises as `read_inputs` and
    `read_teacher`.

    Args:
        past: the run as it is recorded. If `recipe` names the same teachers, their recorded identities are returned
            without reading them: ranks compare them when they read the teachers (`read_teachers`).
    """
    inputs = read_inputs(recipe, tokenizer)
    wanted = recipe.objective.teachers
    if not wanted:
        return inputs
    if past is not None and past.recipe.objective.teachers == wanted:
        return inputs.model_copy(update={"teachers": past.record.inputs.teachers})
    from launcher.runtime.run.teachers import read_teacher  # it loads torch

    found = tuple(read_teacher(recipe, number, tokenizer).identity() for number in range(len(wanted)))
    return inputs.model_copy(update={"teachers": found})
