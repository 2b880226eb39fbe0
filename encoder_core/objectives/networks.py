"""One network by its configuration and heads: what a folder in transformers' format holds."""

from typing import assert_never

from torch import nn

from encoder_core.errors import ModelError
from encoder_core.families.build import DetectorConfig, ModelConfig
from encoder_core.families.hf.interchange import Heads
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.contrastive import ContrastiveConfig, contrastive_model
from encoder_core.objectives.mlm import masked_language_model
from encoder_core.objectives.plm import permuted_language_model
from encoder_core.objectives.replaced import discriminator_model
from encoder_core.objectives.sentence_pairs import masked_language_model_with_pairs


def network(config: ModelConfig, heads: Heads) -> nn.Module:
    """The module whose parameter names the key table of (config, heads) knows. Raises ModelError if none is."""
    match heads:
        case "mlm":
            return masked_language_model(config)
        case "mlm_pair":
            return masked_language_model_with_pairs(config, "nsp")
        case "rtd":
            if not isinstance(config, DetectorConfig):
                raise ModelError(
                    f"{config.family} has no detection head",
                    remedy="use a model of another family than xlnet",
                )
            return discriminator_model(config)
        case "plm":
            if not isinstance(config, XlnetConfig):
                raise ModelError(
                    f"{config.family} does not predict permuted tokens", remedy="use a model of family xlnet"
                )
            return permuted_language_model(config)
        case "none":
            return contrastive_model(config, ContrastiveConfig())
        case _:
            assert_never(heads)
