"""Builds one network with the heads of its terms: the device half of each term that shares an encoder."""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Literal

from encoder_core.families.catalogue import ModelConfig, build_encoder
from encoder_core.layers.attention import Attend, automatic
from encoder_core.objectives.mlm import tied_head
from encoder_core.objectives.multitask import MultitaskModel, mask_decoder
from encoder_core.objectives.term import HeadTerm, Shared
from encoder_core.terms.clm import ClmConfig
from encoder_core.terms.mlm import MlmConfig
from encoder_core.terms.sentence_pairs import NspConfig, SopConfig
from encoder_core.terms.term import HeadConfig

_DESCRIPTION_PACKAGE, _HALF_PACKAGE = "encoder_core.terms.", "encoder_core.objectives."


def head_term(term: HeadConfig, shared: Shared) -> HeadTerm:
    """Return the device half of `term`, from the module of `objectives/` that is named as that of its description. A
    recipe's own class, which adds the settings of the host, is a subclass of the description.

    Raises:
        TypeError: that module has no such half.
    """
    for kind in type(term).__mro__:
        if kind.__module__.startswith(_DESCRIPTION_PACKAGE):
            import_module(kind.__module__.replace(_DESCRIPTION_PACKAGE, _HALF_PACKAGE))
        if kind in HeadTerm.halves:
            return HeadTerm.halves[kind](term, shared)
    raise TypeError(f"the term {term.name} has no device half")


def multitask_model(
    config: ModelConfig,
    terms: Sequence[HeadConfig],
    *,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> MultitaskModel:
    """Build encoder and heads of any family on the default device; weights not yet initialised (`initialise`).

    Raises:
        ModelError: the size of the vocabulary is unknown.
    """
    encoder = build_encoder(config, checkpoint_activations=checkpoint_activations, attend=attend)
    word = encoder.embeddings.word
    shared = Shared(config, word, cache(lambda: tied_head(config, word)))
    on_device = [head_term(term, shared) for term in terms]
    return MultitaskModel(encoder, on_device, mask_decoder(config))


def masked_language_model(
    config: ModelConfig, *, checkpoint_activations: bool = False, attend: Attend = automatic
) -> MultitaskModel:
    """Build a network of any family with masked tokens alone; see `multitask_model`."""
    return multitask_model(
        config, [MlmConfig()], checkpoint_activations=checkpoint_activations, attend=attend
    )


def masked_and_next_language_model(config: ModelConfig) -> MultitaskModel:
    """Build a network that predicts masked tokens and, in causal rows, next ones; see `multitask_model`."""
    return multitask_model(config, [MlmConfig(), ClmConfig()])


PairTask = Literal["nsp", "sop"]


def masked_language_model_with_pairs(
    config: ModelConfig, task: PairTask, *, attend: Attend = automatic
) -> MultitaskModel:
    """Build a network of any family with masked tokens and a term of sentence pairs; see `multitask_model`."""
    pairs = NspConfig() if task == "nsp" else SopConfig()
    return multitask_model(config, [MlmConfig(), pairs], attend=attend)
