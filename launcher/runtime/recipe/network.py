"""The network that a recipe trains: built, or on the meta device. It loads torch; the recipe does not."""

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.any_encoder import AnyEncoder
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.compose import compose
from encoder_core.objectives.losses import ObjectiveModule
from encoder_core.objectives.replaced import ReplacedTokenDetection
from launcher.runtime.recipe.objective import RecipeObjective


def objective_module(
    config: ModelConfig, objective: RecipeObjective, *, checkpoint_activations: bool = False
) -> ObjectiveModule:
    """Return the module that trains `objective` on a model of `config`. Its weights are not yet initialised
    (`initialise`).

    Raises ModelError: terms cannot be combined with each other or with this family, or the vocabulary is unknown.
    """
    return compose(config, objective.terms, checkpoint_activations=checkpoint_activations)


def task_encoder(module: ObjectiveModule) -> AnyEncoder:
    """Return the encoder that is used after pretraining: the only one, or the discriminator's."""
    network = module.discriminator if isinstance(module, ReplacedTokenDetection) else module
    encoder = network.encoder
    assert isinstance(encoder, AnyEncoder)
    return encoder


def meta_module(config: ModelConfig, objective: RecipeObjective) -> ObjectiveModule:
    """Return the module on the meta device, for its names, shapes and size: it takes no memory."""
    with on_meta():
        return objective_module(config, objective)
