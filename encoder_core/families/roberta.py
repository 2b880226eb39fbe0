"""RoBERTa (Liu et al., 2019, arXiv 1907.11692): BERT, trained longer on more text, without next-sentence prediction.

Section 4 has the changes. The encoder is BERT's without token types. As in fairseq, positions are counted from the
padding id + 1. transformers' class adds the same token type to every token: on reading we add its embedding to the
position table, on writing it is zero.
"""

from typing import Any, ClassVar, Literal

from encoder_core.families.config import WithGenerator
from encoder_core.families.config_json import BERT_UNWRITTEN, TIED_DECODER_CONSTANT, ConfigJson, bert_fields
from encoder_core.families.interchange import (
    FoldedTable,
    Heads,
    HfNetwork,
    KeyTable,
    ModelType,
    NamePair,
    embedding_pairs,
    layer_pairs,
    weight_and_bias,
)
from encoder_core.layers.sizes import Activation


class RobertaConfig(WithGenerator):
    """The configuration of a RoBERTa. See `EncoderConfig` and `WithGenerator`. The published models have padding id 1
    and LayerNorm epsilon 1e-5.
    """

    family: Literal["roberta"] = "roberta"
    name: ClassVar[str] = "RoBERTa"
    recipe: ClassVar[str] = "roberta-base"
    offsets_positions_by_padding: ClassVar[bool] = True
    pad_id: int = 1
    layer_norm_eps: float = 1e-5

    @property
    def head_activation(self) -> Activation:
        """Always the exact GELU, the only one that transformers' class for the head supports."""
        return "gelu"

    @property
    def first_position(self) -> int:
        """Index of the first token in the position table: the padding id + 1, as in fairseq."""
        return self.pad_id + 1

    @property
    def padding_row(self) -> int:
        return self.pad_id

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        rows = self.max_length + self.first_position
        fields = CONFIG_JSON.to_fields(self, max_position_embeddings=rows, type_vocab_size=1)
        return HfNetwork("RobertaForMaskedLM", TABLE, fields) if heads == "mlm" else None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("roberta", "RobertaModel", from_json),)


TABLE = KeyTable(  # RoBERTa's parameter names
    pairs=(
        *embedding_pairs("roberta.embeddings"),
        *layer_pairs("roberta.encoder.layer.{layer}"),
        *weight_and_bias("head.dense", "lm_head.dense"),
        *weight_and_bias("head.norm", "lm_head.layer_norm"),
        NamePair("head.decoder.bias", "lm_head.bias"),
    ),
    tied=("lm_head.decoder.weight", "lm_head.decoder.bias"),
    unused=(
        "roberta.embeddings.position_ids",
        "roberta.embeddings.token_type_ids",
        "roberta.pooler.dense.weight",
        "roberta.pooler.dense.bias",
    ),
    folds=(FoldedTable("roberta.embeddings.token_type_embeddings.weight", "encoder.embeddings.position.weight"),),
)


CONFIG_JSON = ConfigJson(
    "roberta",
    bert_fields(vocab=50_265, pad_id=1),
    constants=TIED_DECODER_CONSTANT,
    unwritten=BERT_UNWRITTEN,
    defaults={"max_position_embeddings": 512},
)


def from_json(fields: dict[str, Any]) -> RobertaConfig:
    """Return our configuration for the fields of a config.json."""
    fields = CONFIG_JSON.fill_defaults(fields)
    max_length = fields["max_position_embeddings"] - fields["pad_token_id"] - 1
    return RobertaConfig(**CONFIG_JSON.to_settings(fields), max_length=max_length)
