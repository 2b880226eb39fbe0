"""EuroBERT (Boizard et al., 2025, arXiv 2503.05500): Llama's layers with bidirectional attention.

It differs from ModernBERT by RMSNorm in place of LayerNorm, SwiGLU in place of GeGLU, global layers only, and in the
larger sizes fewer heads of keys and values than of queries. The head's decoder has separate weights or those of the
embeddings (`tied_decoder`).

The released models store the base of rotary positions as `rope_theta`, which all versions of transformers read, so we
write it. Transformers 5 writes `rope_parameters` instead; we read both.

A Llama (Touvron et al., 2023, arXiv 2302.13971) is the same network with the same names and causal attention. So its
folder is read as a EuroBERT, and on causal rows our logits are those of transformers' `LlamaForCausalLM`. Llamas with
scaled rotary positions (from 3.1 on) are refused, because no `rope_theta` gives their angles.

UltraBERT (dmis-lab/UltraBERT-150M, transformers' `ultrabert`) has the same layers. Every third layer sees the whole
row, the others a window; both kinds have their own base of rotary positions. Two Linears precede the decoder.
"""

import math
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from encoder_core.families.config_json import ConfigJson, unsupported_value_error
from encoder_core.families.interchange import OUR_LAYER, Heads, HfNetwork, KeyTable, ModelType, NamePair
from encoder_core.families.pre_norm import PreNormConfig, plain_rope_base
from encoder_core.layers.sizes import Activation, Initializer, SmallForm


class EuroBertConfig(PreNormConfig):
    """The configuration of a EuroBERT. See `PreNormConfig`.

    Attributes:
        key_value_heads: number of heads of keys and values, each shared by equally many query heads. None: `heads`.
        rotary_base: base of the rotary positions of all layers except local ones.
        tied_decoder: whether the head's decoder has the word embeddings as weights, as in small Llamas.
        local_attention: number of tokens in a local layer's window, half of them on each side of the query. Layers 2,
            5, 8 and so on attend to the whole row, the others are local. None: there are no local layers.
        local_rope_base: base of the rotary positions in local layers.
        head_width: width between UltraBERT's two Linears before the decoder; None: the head is the decoder alone.
    """

    family: Literal["eurobert"] = "eurobert"
    name: ClassVar[str] = "EuroBERT"
    recipe: ClassVar[str] = "eurobert-210m"
    rms_norm: ClassVar[bool] = True
    embedding_norm: ClassVar[bool] = False
    fused: ClassVar[bool] = False
    activation: Activation = "silu"
    initializer: Initializer = "normal"
    key_value_heads: int | None = Field(default=None, gt=0)
    rotary_base: float = Field(default=250_000.0, gt=0)
    # Early recipes lack the fields below, so default values are not written, and those recipes stay the same.
    tied_decoder: bool = Field(default=False, exclude_if=lambda tied: not tied)
    local_attention: int | None = Field(default=None, gt=0, multiple_of=2, exclude_if=lambda tokens: tokens is None)
    local_rope_base: float = Field(default=10_000.0, gt=0, exclude_if=lambda base: base == 10_000.0)
    head_width: int | None = Field(default=None, gt=0, exclude_if=lambda width: width is None)

    @model_validator(mode="after")
    def _check_ultrabert_fields(self) -> Self:
        if (self.local_attention is None) != (self.head_width is None):
            raise ValueError("set both local_attention and head_width, as in UltraBERT, or neither")
        return self

    @model_validator(mode="after")
    def _check_key_value_heads(self) -> Self:
        if self.heads % self.key_value_head_count:
            raise ValueError(f"heads ({self.heads}) must be a multiple of key_value_heads ({self.key_value_heads})")
        return self

    @property
    def width_settings(self) -> tuple[str, ...]:
        further = ("key_value_heads", "head_width")
        return (*super().width_settings, *(name for name in further if getattr(self, name) is not None))

    @property
    def has_bare_decoder_head(self) -> bool:
        return self.head_width is None

    @property
    def head_inner_width(self) -> int | None:
        return self.head_width

    @property
    def head_activation(self) -> Activation:
        return "gelu_tanh"

    @property
    def has_decoder_bias(self) -> bool:
        return False

    @property
    def has_norm_before_decoder(self) -> bool:
        return False

    @property
    def has_tied_decoder(self) -> bool:
        return self.tied_decoder

    @property
    def key_value_head_count(self) -> int:
        return self.key_value_heads or self.heads

    def window(self, layer: int) -> int | None:
        return self.local_attention // 2 if self.local_attention and is_local_layer(layer) else None

    def rope_base(self, layer: int) -> float:
        return self.rotary_base if self.window(layer) is None else self.local_rope_base

    def with_rope_base(self, base: float) -> Self:
        return self.model_copy(update={"rotary_base": base})

    def small_form_fields(self, form: SmallForm) -> dict[str, object]:
        """Return the small form's fields, with about the same ratio of key-value heads to query heads."""
        shared = self.key_value_heads
        if shared is not None:
            shared = math.gcd(form.heads, max(1, form.heads * shared // self.heads))
        ultra = {} if self.head_width is None else {"local_attention": form.window, "head_width": form.hidden}
        return super().small_form_fields(form) | {"key_value_heads": shared} | ultra

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        if self.head_width is not None:
            table = ULTRABERT_TIED if self.tied_decoder else ULTRABERT
            return HfNetwork("UltrabertForMaskedLM", table, to_ultrabert(self)) if heads == "mlm" else None
        table = TIED_TABLE if self.tied_decoder else TABLE
        return HfNetwork("EuroBertForMaskedLM", table, to_json(self)) if heads == "mlm" else None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (
            ModelType("eurobert", "EuroBertModel", from_json),
            ModelType("llama", "LlamaModel", from_llama),
            ModelType("ultrabert", "UltrabertModel", from_ultrabert),
        )


def is_local_layer(layer: int) -> bool:
    """Return whether an UltraBERT's layer sees only a window."""
    return (layer + 1) % 3 != 0


_THEIR_LAYER = "model.layers.{layer}"  # prefix of transformers' names of a layer's parameters
TABLE = KeyTable(  # names of the parameters of a EuroBERT or Llama with a separate decoder weight
    pairs=(
        NamePair("encoder.embeddings.word.weight", "model.embed_tokens.weight"),
        NamePair(f"{OUR_LAYER}.attention_norm.weight", f"{_THEIR_LAYER}.input_layernorm.weight"),
        NamePair(f"{OUR_LAYER}.attention.query.weight", f"{_THEIR_LAYER}.self_attn.q_proj.weight"),
        NamePair(f"{OUR_LAYER}.attention.key.weight", f"{_THEIR_LAYER}.self_attn.k_proj.weight"),
        NamePair(f"{OUR_LAYER}.attention.value.weight", f"{_THEIR_LAYER}.self_attn.v_proj.weight"),
        NamePair(f"{OUR_LAYER}.attention.output.weight", f"{_THEIR_LAYER}.self_attn.o_proj.weight"),
        NamePair(f"{OUR_LAYER}.feed_forward_norm.weight", f"{_THEIR_LAYER}.post_attention_layernorm.weight"),
        NamePair(f"{OUR_LAYER}.feed_forward.gate.weight", f"{_THEIR_LAYER}.mlp.gate_proj.weight"),
        NamePair(f"{OUR_LAYER}.feed_forward.up.weight", f"{_THEIR_LAYER}.mlp.up_proj.weight"),
        NamePair(f"{OUR_LAYER}.feed_forward.down.weight", f"{_THEIR_LAYER}.mlp.down_proj.weight"),
        NamePair("encoder.final_norm.weight", "model.norm.weight"),
        NamePair("head.decoder.weight", "lm_head.weight"),
    )
)

TIED_TABLE = KeyTable(pairs=TABLE.pairs[:-1], tied=("lm_head.weight",))
"""The parameter names of a EuroBERT whose decoder is tied to the embeddings."""

_HEAD = tuple(  # UltraBERT's head
    NamePair(f"head.{ours}.weight", f"head.{theirs}.weight")
    for ours, theirs in (("dense", "linear1"), ("second", "linear2"), ("decoder", "decoder"))
)
_ALIASES = (("ultrabert.", "model."), ("cls.", "head.decoder."))  # (prefix in published files, in transformers)
ULTRABERT = KeyTable(pairs=(*TABLE.pairs[:-1], *_HEAD), aliases=_ALIASES)
ULTRABERT_TIED = KeyTable(pairs=ULTRABERT.pairs[:-1], tied=("head.decoder.weight",), aliases=_ALIASES)

_NO_BIAS = (False, "use a model whose Linears have no biases")  # see `ConfigJson.constants`
CONFIG_JSON = ConfigJson(
    "eurobert",
    {
        "layers": ("num_hidden_layers", 12),
        "hidden": ("hidden_size", 768),
        "heads": ("num_attention_heads", 12),
        "feed_forward": ("intermediate_size", 3072),
        "max_length": ("max_position_embeddings", 8192),
        "vocab": ("vocab_size", 128_256),
        "pad_id": ("pad_token_id", 128_001),
        "dropout": ("hidden_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "layer_norm_eps": ("rms_norm_eps", 1e-5),
        "initializer_range": ("initializer_range", 0.02),
        "activation": ("hidden_act", "silu"),
    },
    constants={"attention_bias": _NO_BIAS, "mlp_bias": _NO_BIAS},
    defaults={"num_key_value_heads": None, "tie_word_embeddings": False, "rope_theta": 10_000.0},
)

LLAMA_DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11_008,
    "max_position_embeddings": 2048,
    "vocab_size": 32_000,
    "rms_norm_eps": 1e-6,
}
"""Transformers' defaults of Llama for fields that a config.json lacks, where they differ from EuroBERT's."""

ULTRABERT_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    "max_position_embeddings": 32_768,
    "pad_token_id": 0,
    "sliding_window": 128,
    "prediction_head_size": 768,
}
"""Transformers' defaults of UltraBERT for fields that a config.json lacks."""

ROPE_BASES = {"sliding_attention": 10_000.0, "full_attention": 2_560_000.0}
"""Default bases of rotary positions, by UltraBERT's kind of layer."""


def to_json(config: EuroBertConfig) -> dict[str, Any]:
    """Return the model's fields of config.json.

    Released files have `hidden_dropout`, but transformers' class ignores it: it has no dropout on hidden states.
    """
    return CONFIG_JSON.to_fields(
        config,
        num_key_value_heads=config.key_value_head_count,
        head_dim=config.hidden // config.heads,
        rope_theta=config.rotary_base,
        tie_word_embeddings=config.tied_decoder,
    )


def from_json(fields: dict[str, Any]) -> EuroBertConfig:
    """Return our configuration for the fields of a config.json."""
    fields = CONFIG_JSON.fill_defaults(fields)
    if fields.get("head_dim") not in (None, fields["hidden_size"] // fields["num_attention_heads"]):
        raise unsupported_value_error("head_dim", fields, "use one with hidden_size / num_attention_heads")
    shared, heads = fields["num_key_value_heads"], fields["num_attention_heads"]
    return EuroBertConfig(
        **CONFIG_JSON.to_settings(fields),
        key_value_heads=None if shared == heads else shared,
        rotary_base=plain_rope_base(fields),
        tied_decoder=bool(fields["tie_word_embeddings"]),
    )


def from_llama(fields: dict[str, Any]) -> EuroBertConfig:
    """Return our configuration for the fields of a Llama's config.json. A missing padding id becomes 0."""
    padding = {"pad_token_id": 0} if fields.get("pad_token_id") is None else {}
    return from_json(LLAMA_DEFAULTS | fields | padding)


def to_ultrabert(config: EuroBertConfig) -> dict[str, Any]:
    """Return the fields of an UltraBERT's config.json."""
    bases = {"sliding_attention": config.local_rope_base, "full_attention": config.rotary_base}
    plain = {name: value for name, value in to_json(config).items() if name != "rope_theta"}
    return plain | {
        "model_type": "ultrabert",
        "sliding_window": (config.local_attention or 0) // 2,
        "layer_types": _layer_types(config.layers),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "prediction_head_size": config.head_width,
    }


def from_ultrabert(fields: dict[str, Any]) -> EuroBertConfig:
    """Return our configuration for the fields of an UltraBERT's config.json.

    transformers writes `layer_types`, `sliding_window` and `rope_parameters`. Older published files have lists with
    each layer's window and base instead (`attention_windows`, `rope_theta`). Transformers and we read both.
    """
    fields = ULTRABERT_DEFAULTS | fields
    windows, kinds = fields.get("attention_windows"), fields.get("layer_types")
    if windows is not None:
        if len({window for window in windows if window}) > 1:
            raise unsupported_value_error("attention_windows", fields, "use a model with one window for all")
        fields["sliding_window"] = next(filter(None, windows), fields["sliding_window"])
        kinds = kinds or ["sliding_attention" if window else "full_attention" for window in windows]
    if kinds is not None and kinds != _layer_types(len(kinds)):
        raise unsupported_value_error(
            "layer_types", fields | {"layer_types": kinds}, "use a model in which every third layer is global"
        )
    bases = _rope_bases(fields)
    plain = from_json(fields | {"rope_parameters": None, "rope_theta": bases["full_attention"]})
    return EuroBertConfig.model_validate(
        plain.model_dump()
        | {
            "local_attention": 2 * fields["sliding_window"],
            "local_rope_base": bases["sliding_attention"],
            "head_width": fields["prediction_head_size"],
        }
    )


def _layer_types(layers: int) -> list[str]:
    return ["sliding_attention" if is_local_layer(layer) else "full_attention" for layer in range(layers)]


def _rope_bases(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the base of the rotary positions by kind of layer (`ROPE_BASES`), as the fields give it."""
    bases: dict[str, Any] = dict(ROPE_BASES)
    thetas, parameters = fields.get("rope_theta"), fields.get("rope_parameters")
    if parameters is not None:
        for kind in bases:
            bases[kind] = plain_rope_base({"rope_theta": bases[kind], "rope_parameters": parameters.get(kind)})
    elif thetas is not None:
        listed = list(zip(_layer_types(len(thetas)), thetas, strict=True))
        bases |= dict(listed)
        if any(bases[kind] != theta for kind, theta in listed):
            raise unsupported_value_error("rope_theta", fields, "use a model with one base for each kind of layer")
    return bases
