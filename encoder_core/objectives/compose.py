"""From the terms of an objective to the one module that trains them, and why some cannot be trained together.

`network` makes one network of a configuration and its heads: what a folder in transformers' format holds.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

from torch import nn

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import DetectorConfig, ModelConfig
from encoder_core.families.interchange import Heads
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.attention import Attend, automatic
from encoder_core.objectives.contrastive import ContrastiveConfig, contrastive_model
from encoder_core.objectives.losses import ObjectiveModule
from encoder_core.objectives.mlm import masked_language_model
from encoder_core.objectives.multitask import multitask_model
from encoder_core.objectives.plm import permuted_language_model
from encoder_core.objectives.replaced import discriminator_model
from encoder_core.objectives.sentence_pairs import masked_language_model_with_pairs
from encoder_core.objectives.term import AroundConfig, HeadConfig, ModuleConfig, Refusal, Setting, TermConfig


def refusals(setting: Setting) -> list[Refusal]:
    """Why the terms of `setting` cannot be trained there, each reason once and as its term states it."""
    found = [refusal for term in setting.terms.values() for refusal in term.refusals(setting)]
    whole = [
        name
        for name, term in setting.terms.items()
        if isinstance(term, ModuleConfig) and not isinstance(term, AroundConfig)
    ]
    if len(whole) > 1 and not found:
        found.append(
            Refusal(
                ("objective",),
                f"{' and '.join(whole)} each decide what the whole module is",
                "keep one of them",
            )
        )
    return list(dict.fromkeys(found))


def compose(
    model: ModelConfig,
    terms: Mapping[str, TermConfig],
    *,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> ObjectiveModule:
    """The module that trains `terms`, by their names, on a model of any family; on the default device, weights not yet
    initialised (`initialise`).

    Raises ModelError: they do not go together or not with this family, or the vocabulary is unknown.
    """
    for refusal in refusals(Setting(model, terms)):
        raise ModelError(refusal.what, remedy=refusal.remedy)
    around = next((term for term in terms.values() if isinstance(term, AroundConfig)), None)
    others = [term for term in terms.values() if term is not around]
    if around is None or not others:
        return _module(model, list(terms.values()), checkpoint_activations, attend)
    return around.around(_module(model, others, checkpoint_activations, attend), model)


def _module(
    model: ModelConfig, terms: Sequence[TermConfig], checkpoint_activations: bool, attend: Attend
) -> ObjectiveModule:
    """Of terms of which one at most decides what it is."""
    heads = [term for term in terms if isinstance(term, HeadConfig)]
    for term in terms:
        if isinstance(term, ModuleConfig):
            return term.module(model, heads, checkpoint_activations=checkpoint_activations, attend=attend)
    return multitask_model(model, heads, checkpoint_activations=checkpoint_activations, attend=attend)


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
