"""Builds one network with the heads of its terms: the device half of each term that shares an encoder."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

from torch import nn

from encoder_core.families.catalogue import ModelConfig, build_encoder
from encoder_core.families.config import encoder_layers
from encoder_core.heads.classification import PairHead
from encoder_core.heads.prediction import MaskedLanguageModelHead, SpanBoundaryHead
from encoder_core.heads.shallow_decoder import ShallowDecoder
from encoder_core.layers.attention import Attend, automatic
from encoder_core.objectives.clm import NextTokens
from encoder_core.objectives.condenser import Condenser
from encoder_core.objectives.diffusion import DiffusedTokens
from encoder_core.objectives.distil import Distillation, LayersAlike, StatesAlike
from encoder_core.objectives.mlm import MaskedTokens, tied_head
from encoder_core.objectives.multitask import MultitaskModel, mask_decoder
from encoder_core.objectives.retromae import Reconstruction
from encoder_core.objectives.sentence_pairs import SentencePair
from encoder_core.objectives.span_boundary import SpanBoundary
from encoder_core.objectives.term import HeadTerm
from encoder_core.terms.clm import ClmConfig
from encoder_core.terms.condenser import CondenserConfig
from encoder_core.terms.diffusion import DiffusionConfig
from encoder_core.terms.distil import CosineConfig, DistilConfig, HiddenConfig
from encoder_core.terms.mlm import MlmConfig
from encoder_core.terms.retromae import RetromaeConfig
from encoder_core.terms.sentence_pairs import NspConfig, PairConfig, SopConfig
from encoder_core.terms.span_boundary import SboConfig
from encoder_core.terms.term import HeadConfig


def head_term(
    term: HeadConfig,
    model: ModelConfig,
    word: nn.Embedding,
    head: Callable[[], MaskedLanguageModelHead],
) -> HeadTerm:
    """Return the device half of `term` on a network of `model` with the word embeddings `word`.

    Its heads are on the default device, weights not yet initialised. `head` makes the language-model head, the same for
    all terms.

    Raises:
        TypeError: no device half is listed here for such a term.
    """
    match term:
        case MlmConfig():
            return MaskedTokens(term, head())
        case DiffusionConfig():
            return DiffusedTokens(term, head())
        case ClmConfig():
            return NextTokens(term, head())
        case PairConfig():
            return SentencePair(term, PairHead(model.hidden))
        case SboConfig():
            activation, eps = model.head_activation, model.layer_norm_eps
            return SpanBoundary(term, SpanBoundaryHead(model.hidden, word, activation=activation, eps=eps))
        case RetromaeConfig():
            return Reconstruction(term, shallow_decoder(model), head(), word)
        case CondenserConfig():
            layers = encoder_layers(model, term.layers, lambda: None)
            return Condenser(term, term.early_layer(model.layers), layers, head())
        case DistilConfig():
            return Distillation(term)
        case CosineConfig():
            return StatesAlike(term)
        case HiddenConfig():
            wide = term.projection
            return LayersAlike(term, model.layers, None if wide is None else nn.Linear(model.hidden, wide))
        case _:
            raise TypeError(f"the term {term.name} has no device half")


def shallow_decoder(model: ModelConfig) -> ShallowDecoder:
    """Return RetroMAE's decoder, of the shape of one layer of `model`."""
    return ShallowDecoder(
        model.max_length,
        model.embedding_width,
        model.hidden,
        heads=model.heads,
        inner=model.feed_forward,
        activation=model.activation,
        eps=model.layer_norm_eps,
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
    )


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
    head = cache(lambda: tied_head(config, word))
    on_device = [head_term(term, config, word, head) for term in terms]
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
