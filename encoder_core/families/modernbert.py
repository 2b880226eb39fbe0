"""ModernBERT (Warner et al., 2024, arXiv 2412.13663): BERT with later improvements of language models.

Norms come before each block, positions are rotary, feed-forward blocks are gated (GeGLU), and only the decoder has a
bias (section 2.1). Two of three layers see a window of 128 tokens, so that rows of 8,192 tokens cost little
(alternating attention).

config.json has two forms. The released models have the period of global layers and the two rotary bases
(`global_attn_every_n_layers`, `global_rope_theta`, `local_rope_theta`), which all versions of transformers read, so we
write this form. Transformers 5 writes `layer_types` and `rope_parameters` instead; we read both.
"""

import math
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from encoder_core.families.config_json import (
    TIED_DECODER_CONSTANT,
    ConfigJson,
    activation_to_json,
    unsupported_value_error,
)
from encoder_core.families.interchange import OUR_LAYER, Heads, HfNetwork, KeyTable, ModelType, NamePair
from encoder_core.families.pre_norm import PreNormConfig, plain_rope_base
from encoder_core.layers.sizes import SmallForm


class ModernBertConfig(PreNormConfig):
    """The configuration of a ModernBERT. See `PreNormConfig`.

    Attributes:
        local_attention: number of tokens in a local layer's window, half of them on each side of the query.
        global_every: period of global layers. Layers 0, `global_every`, 2 * `global_every` and so on attend to the
            whole row, the others to their window.
        global_rope_base, local_rope_base: base of the rotary positions in global and in local layers.
    """

    family: Literal["modernbert"] = "modernbert"
    name: ClassVar[str] = "ModernBERT"
    recipe: ClassVar[str] = "modernbert-base"
    local_attention: int = Field(default=128, gt=0, multiple_of=2)
    global_every: int = Field(default=3, gt=0)
    global_rope_base: float = Field(default=160_000.0, gt=0)
    local_rope_base: float = Field(default=10_000.0, gt=0)

    @property
    def output_scale(self) -> float:
        """Megatron initialisation (the paper, section 2.2.1): 1 / sqrt(2 * layers)."""
        return math.sqrt(0.5 / self.layers)

    def window(self, layer: int) -> int | None:
        return self.local_attention // 2 if layer % self.global_every else None

    def rope_base(self, layer: int) -> float:
        return self.local_rope_base if layer % self.global_every else self.global_rope_base

    def with_rope_base(self, base: float) -> Self:
        return self.model_copy(update={"global_rope_base": base})

    def small_form_fields(self, form: SmallForm) -> dict[str, object]:
        own = {
            "feed_forward": form.hidden * self.feed_forward // self.hidden,
            "local_attention": form.window,
            "attention_output_dropout": self.attention_output_dropout if form.drops else 0.0,
        }
        return super().small_form_fields(form) | own

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        return HfNetwork("ModernBertForMaskedLM", TABLE, to_json(self)) if heads == "mlm" else None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("modernbert", "ModernBertModel", from_json),)


_THEIR_LAYER = "model.layers.{layer}"  # prefix of transformers' names of a layer's parameters

TABLE = KeyTable(  # ModernBERT's parameter names
    pairs=(
        NamePair("encoder.embeddings.word.weight", "model.embeddings.tok_embeddings.weight"),
        NamePair("encoder.embeddings.norm.weight", "model.embeddings.norm.weight"),
        NamePair(f"{OUR_LAYER}.attention_norm.weight", f"{_THEIR_LAYER}.attn_norm.weight", first_layer=1),
        NamePair(f"{OUR_LAYER}.attention.qkv.weight", f"{_THEIR_LAYER}.attn.Wqkv.weight"),
        NamePair(f"{OUR_LAYER}.attention.output.weight", f"{_THEIR_LAYER}.attn.Wo.weight"),
        NamePair(f"{OUR_LAYER}.feed_forward_norm.weight", f"{_THEIR_LAYER}.mlp_norm.weight"),
        NamePair(f"{OUR_LAYER}.feed_forward.up.weight", f"{_THEIR_LAYER}.mlp.Wi.weight"),
        NamePair(f"{OUR_LAYER}.feed_forward.down.weight", f"{_THEIR_LAYER}.mlp.Wo.weight"),
        NamePair("encoder.final_norm.weight", "model.final_norm.weight"),
        NamePair("head.dense.weight", "head.dense.weight"),
        NamePair("head.norm.weight", "head.norm.weight"),
        NamePair("head.decoder.bias", "decoder.bias"),
    ),
    tied=("decoder.weight",),
)

_BIASES_REMEDY = "use a model in which the decoder, and nothing else, has a bias"
CONFIG_JSON = ConfigJson(
    "modernbert",
    {
        "layers": ("num_hidden_layers", 22),
        "hidden": ("hidden_size", 768),
        "heads": ("num_attention_heads", 12),
        "feed_forward": ("intermediate_size", 1152),
        "max_length": ("max_position_embeddings", 8192),
        "vocab": ("vocab_size", 50_368),
        "pad_id": ("pad_token_id", 50_283),
        "dropout": ("embedding_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "layer_norm_eps": ("norm_eps", 1e-5),
        "initializer_range": ("initializer_range", 0.02),
        "local_attention": ("local_attention", 128),
        "activation": ("hidden_activation", "gelu"),
    },
    constants={
        **TIED_DECODER_CONSTANT,
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), (False, _BIASES_REMEDY)),
        "decoder_bias": (True, _BIASES_REMEDY),
    },
    defaults={
        "classifier_activation": "gelu",
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
    },
)


def to_json(config: ModernBertConfig) -> dict[str, Any]:
    """Return the model's fields of config.json.

    transformers' class has one rate for both dropouts of attention. We write the rate of the probabilities. So do the
    released files, although the models were trained with a rate of 0.1 on attention's output.
    """
    return CONFIG_JSON.to_fields(
        config,
        mlp_dropout=config.dropout,
        classifier_activation=activation_to_json(config.activation),
        global_attn_every_n_layers=config.global_every,
        global_rope_theta=config.global_rope_base,
        local_rope_theta=config.local_rope_base,
    )


def from_json(fields: dict[str, Any]) -> ModernBertConfig:
    """Return our configuration for the fields of a config.json."""
    fields = CONFIG_JSON.fill_defaults(fields)
    if fields["classifier_activation"] != fields["hidden_activation"]:
        raise unsupported_value_error("classifier_activation", fields, "use one with the value of hidden_activation")
    return ModernBertConfig(
        **CONFIG_JSON.to_settings(fields),
        attention_output_dropout=fields["attention_dropout"],
        global_every=_global_layer_period(fields),
        global_rope_base=_rope_base(fields, "full_attention", "global_rope_theta"),
        local_rope_base=_rope_base(fields, "sliding_attention", "local_rope_theta"),
    )


def _global_layer_period(fields: dict[str, Any]) -> int:
    """Return n if every n-th layer is global, from `layer_types` or else from `global_attn_every_n_layers`."""
    types = fields.get("layer_types")
    if types is None:
        return int(fields["global_attn_every_n_layers"])
    later = [layer for layer, kind in enumerate(types) if kind == "full_attention" and layer]
    every = later[0] if later else max(len(types), 1)
    regular = ["sliding_attention" if layer % every else "full_attention" for layer in range(len(types))]
    if types != regular or len(types) != fields["num_hidden_layers"]:
        raise unsupported_value_error(
            "layer_types", fields, "use a model that lists all its layers: 0, n, 2 n and so on global, the others local"
        )
    return every


def _rope_base(fields: dict[str, Any], kind: str, older_key: str) -> float:
    """Return the base for this kind of layer, from `rope_parameters` or else from the field `older_key`."""
    parameters = (fields.get("rope_parameters") or {}).get(kind)
    return plain_rope_base(fields | {"rope_parameters": parameters}, older_key)
