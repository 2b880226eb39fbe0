"""From a model configuration to its encoder, whatever the family."""

from encoder_core.families import roberta
from encoder_core.families.roberta import RobertaConfig
from encoder_core.layers.encoder import Encoder
from encoder_core.layers.kernels import Attend, automatic

ModelConfig = RobertaConfig
"""The configuration of any family, told apart by its `family` field."""


def build_encoder(
    config: ModelConfig, *, checkpoint_activations: bool = False, attend: Attend = automatic
) -> Encoder:
    """The family's encoder, weights not yet initialised. Raises ModelError if the vocabulary is unknown."""
    return roberta.build(config, checkpoint_activations=checkpoint_activations, attend=attend)
