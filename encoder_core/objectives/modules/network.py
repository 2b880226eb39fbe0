"""Builds a single network with heads, such as that of a folder in transformers' format."""

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
    """Build an encoder of any family with a masked-language-model head; see `multitask_model`."""
    return multitask_model(config, [MlmConfig()])


def build_network(config: ModelConfig, heads: Heads) -> nn.Module:
    """Build a network with these heads, whose parameter names are those of its `KeyTable`.

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
                return DenoiseConfig().build(config)  # the head adds no parameters
            return ContrastiveConfig().build(config)
        case _:
            assert_never(heads)
