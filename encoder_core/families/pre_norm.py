"""The base of recent encoders: norms before each block, rotary positions, gated feed-forward blocks, no biases."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from encoder_core.families.config import WithGenerator
from encoder_core.families.config_json import unsupported_value_error

if TYPE_CHECKING:  # torch is imported only where encoders are built, not to read a configuration
    from encoder_core.layers.encoder import PreNormLayer
    from encoder_core.layers.residual import LayerNorm, RMSNorm


class PreNormConfig(WithGenerator):
    """The configuration of a pre-norm encoder. See `EncoderConfig` and `WithGenerator`.

    `feed_forward` is the width of each half of the gated block. No table limits the length of a row: `max_length` is
    the length for which the model is trained.

    Attributes:
        embedding_norm: whether a norm follows the embeddings; then the first layer's attention has no norm before it.
        rms_norm: whether norms are RMSNorms (Zhang and Sennrich, 2019), without mean and bias; otherwise LayerNorms.
        fused: whether query, key and value projections are one parameter, and so are the halves of the gated block.
        dropout: dropout rate of the embeddings and inside the feed-forward block.
        attention_output_dropout: dropout rate of attention's output, before it is added to the hidden states.
    """

    has_rotary_positions: ClassVar[bool] = True
    has_length_limit: ClassVar[bool] = False
    biases: ClassVar[bool] = False
    rms_norm: ClassVar[bool] = False
    fused: ClassVar[bool] = True
    max_length: int = Field(default=8192, gt=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_output_dropout: float = Field(default=0.0, ge=0, lt=1)
    layer_norm_eps: float = Field(default=1e-5, gt=0)

    @model_validator(mode="after")
    def _check_head_width_even(self) -> Self:
        if self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden / heads ({self.hidden // self.heads}) must be even: rotary positions rotate pairs of elements"
            )
        return self

    @property
    def key_value_head_count(self) -> int:
        """Number of heads of keys and values."""
        return self.heads

    @abstractmethod
    def rope_base(self, layer: int) -> float: ...

    @abstractmethod
    def with_rope_base(self, base: float) -> Self: ...

    def has_attention_norm(self, layer: int) -> bool:
        """Return whether a layer has a norm before its attention."""
        return layer > 0 or not self.embedding_norm

    def encoder_weight_count(self) -> int:
        attention = 2 * self.hidden * (self.hidden + self.hidden // self.heads * self.key_value_head_count)
        norms = sum(1 + self.has_attention_norm(layer) for layer in range(self.layers)) + 1
        layers = self.layers * (attention + 3 * self.hidden * self.feed_forward)
        return self.embedding_weight_count() + layers + norms * self.hidden

    def encoder_layers(self) -> "list[PreNormLayer]":
        return [_build_layer(self, layer) for layer in range(self.layers)]

    def final_norm(self) -> "LayerNorm | RMSNorm":
        return _build_norm(self)


def _build_layer(config: PreNormConfig, layer: int) -> "PreNormLayer":
    from encoder_core.layers.attention import SelfAttention, attend_with_best_kernel
    from encoder_core.layers.encoder import GatedFeedForward, PreNormLayer

    attention = SelfAttention(
        config.hidden,
        config.heads,
        config.attention_dropout,
        attend_with_best_kernel,
        bias=config.biases,
        fused=config.fused,
        key_value_heads=config.key_value_head_count,
        window=config.window(layer),
        rotary_base=config.rope_base(layer),
        output_scale=config.output_scale,
    )
    feed_forward = GatedFeedForward(
        config.hidden,
        config.feed_forward,
        config.activation,
        fused=config.fused,
        dropout=config.dropout,
        output_scale=config.output_scale,
    )
    return PreNormLayer(
        attention,
        feed_forward,
        attention_norm=_build_norm(config) if config.has_attention_norm(layer) else None,
        feed_forward_norm=_build_norm(config),
        dropout=config.attention_output_dropout,
    )


def _build_norm(config: PreNormConfig) -> "LayerNorm | RMSNorm":
    from encoder_core.layers.residual import LayerNorm, RMSNorm

    if config.rms_norm:
        return RMSNorm(config.hidden, eps=config.layer_norm_eps)
    return LayerNorm(config.hidden, eps=config.layer_norm_eps, bias=config.biases)


def plain_rope_base(fields: Mapping[str, Any], key: str = "rope_theta") -> float:
    """Return the base of rotary positions from the fields of a config.json: from `rope_parameters`, which transformers
    5 writes, or from `rope_scaling`, its older name, or else from `fields[key]`.

    Raises:
        ModelError: rotary positions are scaled (a `rope_type`, or its older name `type`, other than default).
    """
    base = fields[key]
    for name in ("rope_parameters", "rope_scaling"):
        parameters = fields.get(name) or {}
        if parameters.get("rope_type", parameters.get("type", "default")) != "default":
            remedy = "use a model with unscaled rotary positions (rope_type default)"
            raise unsupported_value_error(name, fields, remedy)
        base = parameters.get("rope_theta", base)
    return float(base)
