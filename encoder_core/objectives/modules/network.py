"""Single networks with heads: as a folder in transformers' format holds them, or with masked tokens alone."""

from typing import assert_never

from torch import nn

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import ModelConfig, family_names_where
from encoder_core.families.interchange import Heads
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.denoise import DenoiseConfig
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.detection import discriminator_model
from encoder_core.objectives.modules.multitask import MultitaskModel, multitask_model
from encoder_core.objectives.plm import PlmConfig
from encoder_core.objectives.sentence_pairs import NspConfig


def masked_language_model(config: ModelConfig) -> MultitaskModel:
    """Build a network of any family with masked tokens alone; see `multitask_model`."""
    return multitask_model(config, [MlmConfig()])


def build_network(config: ModelConfig, heads: Heads) -> nn.Module:
    """Build the module whose parameter names are in the key table of (config, heads).

    Raises:
        ModelError: the family has no such heads.
    """
    match heads:
        case "mlm":
            return masked_language_model(config)
        case "mlm_pair":
            return multitask_model(config, [MlmConfig(), NspConfig()])
        case "rtd":
            if not config.has_generator:
                suited = family_names_where(lambda family: family.has_generator)
                raise ModelError(
                    f"{config.family} has no detection head",
                    remedy=f"use a model of family {suited}",
                )
            return discriminator_model(config)
        case "plm":
            return PlmConfig().build(config)
        case "denoise":
            return DenoiseConfig().build(config)
        case "none":
            if config.has_decoder:
                return DenoiseConfig().build(config)  # its head has no parameters of its own
            return ContrastiveConfig().build(config)
        case _:
            assert_never(heads)
