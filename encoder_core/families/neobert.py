"""NeoBERT (Le Breton et al., 2025, arXiv 2502.19587): as wide as BERT base, and more than twice as deep.

It has 28 layers of width 768, because deep and narrow models use their parameters better (section 3.1). Norms are
RMSNorms before each block, positions are rotary, and blocks are gated (SwiGLU) with two thirds of BERT's inner width,
so that they have as many parameters. Only the decoder has a bias; its weights are not tied to the embeddings.

transformers has no class for NeoBERT, so an export names none and has the format of the authors' code. There, query,
key and value are one matrix, head by head, and so are the two halves of the gated block. Rotary positions rotate pairs
of neighbours in a head, ours pairs half a head apart, so rows of queries and keys have another order.
"""

from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from encoder_core.errors import ModelError
from encoder_core.families.config_json import ConfigJson
from encoder_core.families.interchange import OUR_LAYER, Heads, HfNetwork, KeyTable, ModelType, NamePair, TensorPart
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.layers.sizes import Activation


class NeoBertConfig(PreNormConfig):
    """The configuration of a NeoBERT. See `PreNormConfig`.

    Attributes:
        rotary_base: base of the rotary positions of all layers.
    """

    family: Literal["neobert"] = "neobert"
    name: ClassVar[str] = "NeoBERT"
    recipe: ClassVar[str] = "neobert-base"
    rms_norm: ClassVar[bool] = True
    embedding_norm: ClassVar[bool] = False
    fused: ClassVar[bool] = False
    max_length: int = Field(default=4096, gt=1)
    activation: Activation = "silu"
    rotary_base: float = Field(default=10_000.0, gt=0)

    @property
    def has_bare_decoder_head(self) -> bool:
        return True

    @property
    def has_decoder_bias(self) -> bool:
        return True

    @property
    def has_tied_decoder(self) -> bool:
        return False

    def rope_base(self, layer: int) -> float:
        return self.rotary_base

    def with_rope_base(self, base: float) -> Self:
        return self.model_copy(update={"rotary_base": base})

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        return HfNetwork(None, key_table(self), to_json(self)) if heads == "mlm" else None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("neobert", None, from_json),)


_THEIRS = "model.transformer_encoder.{layer}"  # prefix of a layer's parameters in the authors' code


def key_table(config: NeoBertConfig) -> KeyTable:
    """Return the names of the parameters, and their rows in packed matrices."""
    query, key, value = (partial(_head_rows, config, part) for part in range(3))
    qkv, inner = 3 * config.hidden, config.feed_forward
    return KeyTable(
        pairs=(
            NamePair("encoder.embeddings.word.weight", "model.encoder.weight"),
            NamePair(f"{OUR_LAYER}.attention_norm.weight", f"{_THEIRS}.attention_norm.weight"),
            NamePair(f"{OUR_LAYER}.attention.query.weight", f"{_THEIRS}.qkv.weight", part=TensorPart(qkv, query)),
            NamePair(f"{OUR_LAYER}.attention.key.weight", f"{_THEIRS}.qkv.weight", part=TensorPart(qkv, key)),
            NamePair(f"{OUR_LAYER}.attention.value.weight", f"{_THEIRS}.qkv.weight", part=TensorPart(qkv, value)),
            NamePair(f"{OUR_LAYER}.attention.output.weight", f"{_THEIRS}.wo.weight"),
            NamePair(f"{OUR_LAYER}.feed_forward_norm.weight", f"{_THEIRS}.ffn_norm.weight"),
            *(
                NamePair(
                    f"{OUR_LAYER}.feed_forward.{half}.weight",
                    f"{_THEIRS}.ffn.w12.weight",
                    part=TensorPart(2 * inner, partial(range, first, first + inner)),
                )
                for half, first in (("gate", 0), ("up", inner))
            ),
            NamePair(f"{OUR_LAYER}.feed_forward.down.weight", f"{_THEIRS}.ffn.w3.weight"),
            NamePair("encoder.final_norm.weight", "model.layer_norm.weight"),
            NamePair("head.decoder.weight", "decoder.weight"),
            NamePair("head.decoder.bias", "decoder.bias"),
        )
    )


def _head_rows(config: NeoBertConfig, part: int) -> list[int]:
    """Return the row indices of query, key or value (`part` 0, 1, 2) in the packed matrix, whose rows are [heads, 3,
    width], in the order of our rows: for query and key, even rows before odd rows."""
    width = config.hidden // config.heads
    order = range(width) if part == 2 else (*range(0, width, 2), *range(1, width, 2))
    return [(3 * head + part) * width + row for head in range(config.heads) for row in order]


CONFIG_JSON = ConfigJson(
    "neobert",
    {
        "layers": ("num_hidden_layers", None),
        "hidden": ("hidden_size", None),
        "heads": ("num_attention_heads", None),
        "max_length": ("max_length", None),
        "vocab": ("vocab_size", None),
        "pad_id": ("pad_token_id", 0),
        "layer_norm_eps": ("norm_eps", None),
        "initializer_range": ("decoder_init_range", 0.02),
        "rotary_base": ("rope_theta", 10_000.0),  # our own field: the authors' code always has this base
    },
)
"""A default of None: the authors' code has no default, so a config.json must have the field."""

_WIDTH_MULTIPLE = 8
"""In the authors' code the inner width is two thirds of `intermediate_size`, rounded up to a multiple of this."""


def to_json(config: NeoBertConfig) -> dict[str, Any]:
    """Return the fields of config.json. Raises ModelError: the activation is not silu, or the inner width is not a
    multiple of 8."""
    if config.activation != "silu":
        raise ModelError(
            f"model.activation is {config.activation}, but NeoBERT supports silu only",
            remedy="train with model.activation: silu to export",
        )
    if config.feed_forward % _WIDTH_MULTIPLE:
        raise ModelError(
            f"model.feed_forward is {config.feed_forward}, but NeoBERT supports multiples of {_WIDTH_MULTIPLE} only",
            remedy=f"train with model.feed_forward: {_round_up(config.feed_forward)} to export",
        )
    return CONFIG_JSON.to_fields(
        config,
        embedding_init_range=config.initializer_range,
        intermediate_size=config.feed_forward * 3 // 2,
        tie_word_embeddings=False,
    )


def from_json(fields: dict[str, Any]) -> NeoBertConfig:
    """Return our configuration for the fields of a config.json. Raises ModelError: a field is missing."""
    required_names = [theirs for theirs, default in CONFIG_JSON.fields.values() if default is None]
    missing = [name for name in (*required_names, "intermediate_size") if name not in fields]
    if missing:
        raise ModelError(
            f"config.json of a neobert lacks {', '.join(missing)}",
            remedy="use the config.json of the published weights; if Maskfleet 0.2 wrote it, export the run again",
        )
    return NeoBertConfig(
        **CONFIG_JSON.read_settings(fields),
        feed_forward=_round_up(2 * fields["intermediate_size"] // 3),
    )


def _round_up(width: int) -> int:
    """Round up to a multiple of `_WIDTH_MULTIPLE`."""
    return -(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
