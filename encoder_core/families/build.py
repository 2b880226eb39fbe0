"""From a model configuration to its encoder, whatever the family."""

from typing import Annotated, assert_never

from pydantic import Field

from encoder_core.families import albert, bert, deberta, electra, pre_norm, roberta, xlm, xlnet
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.encoder import Embeddings, Encoder
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder

ModelConfig = Annotated[
    BertConfig
    | RobertaConfig
    | AlbertConfig
    | ElectraConfig
    | DebertaConfig
    | DebertaV2Config
    | XlnetConfig
    | ModernBertConfig
    | EuroBertConfig
    | XlmConfig,
    Field(discriminator="family"),
]
"""The configuration of any family, told apart by its `family` field."""

DetectorConfig = (
    BertConfig
    | RobertaConfig
    | AlbertConfig
    | ElectraConfig
    | DebertaConfig
    | DebertaV2Config
    | ModernBertConfig
    | EuroBertConfig
    | XlmConfig
)
"""Families that have a `generator`, a smaller one of their kind on the same embeddings."""


def language_table(config: ModelConfig) -> tuple[str, ...]:
    """The languages that the model has embeddings of, in their order; empty in most families."""
    return config.languages if isinstance(config, XlmConfig) and config.language_table else ()


AnyEncoder = Encoder | DisentangledEncoder | TwoStreamEncoder
"""Batch to hidden states [T, H], with the input embeddings as `embeddings`."""


def build_encoder(
    config: ModelConfig,
    *,
    embeddings: Embeddings | None = None,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> AnyEncoder:
    """The family's encoder, weights not yet initialised. Raises ModelError if the vocabulary is unknown.

    `embeddings`: shared with another network of the family, if given; XLNet shares none. `attend` is the kernel of
    plain attention; disentangled and two-stream attention have their own.
    """
    match config:
        case BertConfig():
            return bert.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case AlbertConfig():
            return albert.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case ElectraConfig():
            return electra.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case RobertaConfig():
            return roberta.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case XlmConfig():
            return xlm.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case DebertaConfig() | DebertaV2Config():
            return deberta.build(config, embeddings=embeddings, checkpoint_activations=checkpoint_activations)
        case XlnetConfig():
            return xlnet.build(config, checkpoint_activations=checkpoint_activations)
        case PreNormConfig():
            return pre_norm.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case _ as never:
            assert_never(never)
