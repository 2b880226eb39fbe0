"""Composes the terms of an objective into the module that trains them.

`network` builds one network with its heads, as a folder in transformers' format holds it.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

from torch import nn

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import DetectorConfig, ModelConfig, family_names_where
from encoder_core.families.interchange import Heads
from encoder_core.layers.attention import Attend, automatic
from encoder_core.objectives.contrastive import DetectionWithVectors, MultitaskWithVectors, contrastive_model
from encoder_core.objectives.denoise import denoising_model
from encoder_core.objectives.losses import ObjectiveModule
from encoder_core.objectives.multitask import MultitaskModel
from encoder_core.objectives.network import (
    masked_language_model,
    masked_language_model_with_pairs,
    multitask_model,
)
from encoder_core.objectives.plm import permuted_language_model
from encoder_core.objectives.replaced import (
    ReplacedTokenDetection,
    discriminator_model,
    gradient_disentangled_detection,
    replaced_token_detection,
)
from encoder_core.terms.composition import ObjectiveParts, refusals
from encoder_core.terms.contrastive import ContrastiveConfig
from encoder_core.terms.denoise import DenoiseConfig
from encoder_core.terms.plm import PlmConfig
from encoder_core.terms.replaced import ReplacedTokenConfig
from encoder_core.terms.term import AroundConfig, HeadConfig, ModuleConfig, Setting, TermConfig, last_weight


def compose(
    model: ModelConfig,
    terms: Mapping[str, TermConfig],
    *,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> ObjectiveModule:
    """Build the module that trains `terms` (by name) on a model of any family, on the default device, weights not yet
    initialised (`initialise`).

    Raises:
        ModelError: the terms cannot be combined or do not suit this family, or the size of the vocabulary is unknown.
    """
    for refusal in refusals(Setting(model, terms)):
        raise ModelError(refusal.what, remedy=refusal.remedy)
    parts = ObjectiveParts.from_terms(terms)
    if parts.whole is None:
        module: ObjectiveModule = multitask_model(
            model, parts.heads, checkpoint_activations=checkpoint_activations, attend=attend
        )
    else:
        module = build_module(
            parts.whole, model, parts.heads, checkpoint_activations=checkpoint_activations, attend=attend
        )
    return module if parts.around is None else wrap_module(parts.around, module, model)


def build_module(
    term: ModuleConfig,
    model: ModelConfig,
    heads: Sequence[HeadConfig],
    *,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> ObjectiveModule:
    """Build the module that trains `term` and `heads`, on the default device; weights not yet initialised.

    Raises:
        TypeError: no device half is listed here for such a term.
    """
    match term:
        case PlmConfig():
            weight = last_weight(term.weight)
            return permuted_language_model(model, weight, checkpoint_activations=checkpoint_activations)
        case DenoiseConfig():
            weight = last_weight(term.weight)
            return denoising_model(
                model, weight, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case ReplacedTokenConfig():
            assert isinstance(model, DetectorConfig)  # the recipe's checks refuse other models
            disentangled = term.embeddings == "gradient_disentangled"
            build = gradient_disentangled_detection if disentangled else replaced_token_detection
            return build(model, term, heads, checkpoint_activations=checkpoint_activations, attend=attend)
        case ContrastiveConfig():
            return contrastive_model(
                model, term, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case _:
            raise TypeError(f"the term {term.name} has no device half")


def wrap_module(term: AroundConfig, module: ObjectiveModule, model: ModelConfig) -> ObjectiveModule:
    """Return the module that trains `term` and those of `module`, whose parameters keep their names.

    Raises:
        TypeError: no device half is listed here for such a term.
    """
    if not isinstance(term, ContrastiveConfig):
        raise TypeError(f"the term {term.name} has no device half around others")
    if isinstance(module, ReplacedTokenDetection):
        return DetectionWithVectors(module, term, model.hidden)
    assert isinstance(module, MultitaskModel)  # the recipe's checks refuse other objectives
    return MultitaskWithVectors(module, term, model.hidden)


def network(config: ModelConfig, heads: Heads) -> nn.Module:
    """Build the module whose parameter names are in the key table of (config, heads).

    Raises:
        ModelError: the family has no such heads.
    """
    match heads:
        case "mlm":
            return masked_language_model(config)
        case "mlm_pair":
            return masked_language_model_with_pairs(config, "nsp")
        case "rtd":
            if not isinstance(config, DetectorConfig):
                suited = family_names_where(lambda family: issubclass(family, DetectorConfig))
                raise ModelError(
                    f"{config.family} has no detection head",
                    remedy=f"use a model of family {suited}",
                )
            return discriminator_model(config)
        case "plm":
            return permuted_language_model(config)
        case "denoise":
            return denoising_model(config)
        case "none":
            if config.has_decoder:
                return denoising_model(config)  # its head has no parameters of its own
            return contrastive_model(config, ContrastiveConfig())
        case _:
            assert_never(heads)
