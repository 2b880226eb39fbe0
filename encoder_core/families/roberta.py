"""RoBERTa (Liu et al., 2019, arXiv 1907.11692): BERT, trained longer on more text, without next-sentence prediction.

The changes are those of section 4. The encoder is BERT's without token types. As in fairseq, positions are counted
from the padding id + 1. transformers' class adds one token type to every token: reading folds it into the positions,
writing gives zeros.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from encoder_core.families.config import WithGenerator, encoder_layers
from encoder_core.families.interchange import (
    Fold,
    Heads,
    HfNetwork,
    KeyTable,
    ModelType,
    Pair,
    embedding_pairs,
    layer_pairs,
    shared_from_json,
    shared_to_json,
    with_bias,
)
from encoder_core.layers.sizes import Activation

if TYPE_CHECKING:  # torch is imported only where encoders are built: reading a configuration needs none
    from encoder_core.layers.attention import Attend
    from encoder_core.layers.encoder import Embeddings, Encoder


class RobertaConfig(WithGenerator):
    """The configuration of a RoBERTa. See `EncoderConfig` and `WithGenerator`. The published models have padding id 1
    and LayerNorm epsilon 1e-5.
    """

    family: Literal["roberta"] = "roberta"
    name: ClassVar[str] = "RoBERTa"
    recipe: ClassVar[str] = "roberta-base"
    pad_id: int = 1
    layer_norm_eps: float = 1e-5

    @property
    def head_activation(self) -> Activation:
        """Always the exact GELU, because transformers' class for the head supports no other."""
        return "gelu"

    @property
    def first_position(self) -> int:
        """Row of the position table for the first token of a row; the rows before it are never used (fairseq)."""
        return self.pad_id + 1

    @property
    def position_rows(self) -> int:
        return self.max_length + self.first_position

    def encoder(
        self,
        *,
        embeddings: "Embeddings | None" = None,
        checkpoint_activations: bool = False,
        attend: "Attend | None" = None,
    ) -> "Encoder":
        from encoder_core.layers.encoder import Encoder

        layers = encoder_layers(self, self.layers, lambda: attend)
        return Encoder(embeddings or _embeddings(self), layers, checkpoint_activations=checkpoint_activations)

    @property
    def offsets_positions_by_padding(self) -> bool:
        return True

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        return HfNetwork("RobertaForMaskedLM", TABLE, to_json(self)) if heads == "mlm" else None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("roberta", "RobertaModel", from_json),)


BASE = RobertaConfig(layers=12, hidden=768, heads=12, feed_forward=3072, vocab=50_265, initializer="normal")
LARGE = RobertaConfig(layers=24, hidden=1024, heads=16, feed_forward=4096, vocab=50_265, initializer="normal")


def _embeddings(config: RobertaConfig) -> "Embeddings":
    from encoder_core.layers.encoder import Embeddings

    return Embeddings(
        config.vocabulary,
        config.hidden,
        positions=config.max_length + config.first_position,
        first_position=config.first_position,
        padding=config.pad_id,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )


TABLE = KeyTable(
    pairs=(
        *embedding_pairs("encoder.embeddings", "roberta.embeddings"),
        *layer_pairs("encoder.layers.{layer}", "roberta.encoder.layer.{layer}"),
        *with_bias("head.dense", "lm_head.dense"),
        *with_bias("head.norm", "lm_head.layer_norm"),
        Pair("head.decoder.bias", "lm_head.bias"),
    ),
    tied=("lm_head.decoder.weight", "lm_head.decoder.bias"),
    unused=(
        "roberta.embeddings.position_ids",
        "roberta.embeddings.token_type_ids",
        "roberta.pooler.dense.weight",
        "roberta.pooler.dense.bias",
    ),
    folds=(Fold("roberta.embeddings.token_type_embeddings.weight", "encoder.embeddings.position.weight"),),
)


DEFAULTS: dict[str, Any] = {
    "vocab_size": 50_265,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 1,
}
"""What transformers assumes where a config.json is silent, beyond `interchange.DEFAULTS`."""


def to_json(config: RobertaConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe the model."""
    return {
        "model_type": "roberta",
        **shared_to_json(config),
        "max_position_embeddings": config.max_length + config.first_position,
        "type_vocab_size": 1,
    }


def from_json(fields: dict[str, Any]) -> RobertaConfig:
    """Return our configuration for the fields of a config.json.

    Raises:
        ModelError: the model has features that we do not support.
    """
    fields = DEFAULTS | fields
    values = shared_from_json(fields)
    max_length = fields["max_position_embeddings"] - fields["pad_token_id"] - 1
    return RobertaConfig(**values, max_length=max_length)
