"""Builds the network that a recipe trains, also on the meta device. No other module of recipes imports torch."""

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.encoder import checkpoint_activations
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.compose import compose
from encoder_core.objectives.modules.losses import ObjectiveModule
from launcher.runtime.recipe.objective import RecipeObjective


def objective_module(config: ModelConfig, objective: RecipeObjective, *, recompute: bool = False) -> ObjectiveModule:
    """Return the module that trains `objective` on a model of `config`. Its weights are not yet initialised
    (`initialise`). `recompute`: whether layers are computed again in the backward pass, to save memory.

    Raises ModelError: terms cannot be combined with each other or with this family, or the vocabulary is unknown.
    """
    module = compose(config, objective.terms)
    if recompute:
        checkpoint_activations(module)
    return module


def meta_module(config: ModelConfig, objective: RecipeObjective) -> ObjectiveModule:
    """Return the module on the meta device, where it takes no memory: for its names, shapes and size."""
    with on_meta():
        return objective_module(config, objective)
