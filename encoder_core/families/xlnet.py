"""XLNet (Yang et al., 2019, arXiv 1906.08237): predicts tokens in a random order, without masks.

Each token is predicted from those before it in a permutation, so that the input is always real text (section 2.2). The
query stream knows the position of a token but not the token; the content stream knows both (section 2.3). The memory of
earlier rows and relative positions are Transformer-XL's (section 2.4).
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from encoder_core.errors import ModelError
from encoder_core.families.config import EncoderConfig
from encoder_core.families.config_json import ConfigJson, published_value
from encoder_core.families.interchange import (
    OUR_LAYER,
    Heads,
    HfNetwork,
    KeyTable,
    ModelType,
    NamePair,
    weight_and_bias,
)
from encoder_core.layers.sizes import Recurrence, SmallForm, feed_forward_weight_count, norm_weight_count

if TYPE_CHECKING:  # torch is imported only where encoders are built, not to read a configuration
    from encoder_core.layers.encoder import Embeddings
    from encoder_core.layers.xlnet_encoder import TwoStreamEncoder, TwoStreamLayer


class XlnetConfig(EncoderConfig):
    """The configuration of an XLNet. See `EncoderConfig`.

    Attributes:
        reuse: number of tokens at the start of each row that are appended to the memory. The next row of the same text
            begins after them.
        memory: number of tokens in each layer's memory; 0: no recurrence.
        memory_refresh: period in steps with which training recomputes the memory with the current weights, which costs
            the forward passes of memory / reuse steps. Periodic checkpoints are saved only at these steps.
    """

    family: Literal["xlnet"] = "xlnet"
    name: ClassVar[str] = "XLNet"
    recipe: ClassVar[str] = "xlnet-base"
    main_heads: ClassVar[Heads] = "plm"
    permutes: ClassVar[bool] = True
    class_token_last: ClassVar[bool] = True
    takes_token_types: ClassVar[bool] = True
    has_length_limit: ClassVar[bool] = False
    embedding_norm: ClassVar[bool] = False
    pad_id: int = 5
    reuse: int = Field(default=256, ge=0)
    memory: int = Field(default=384, ge=0)
    memory_refresh: int = Field(default=100, gt=0)

    @model_validator(mode="after")
    def _check_memory_has_reuse(self) -> Self:
        if self.memory and not self.reuse:
            raise ValueError(f"memory is {self.memory}, but with reuse 0 it stays empty: set reuse, or set memory to 0")
        return self

    def encoder(self, *, embeddings: "Embeddings | None" = None) -> "TwoStreamEncoder":
        from encoder_core.layers.xlnet_encoder import TwoStreamEncoder

        return TwoStreamEncoder(
            self.input_embeddings(),
            [_build_layer(self) for _ in range(self.layers)],
            recurrence=self.recurrence,
            dropout=self.dropout,
        )

    @property
    def recurrence(self) -> Recurrence | None:
        return Recurrence(self.reuse, self.memory, self.memory_refresh) if self.memory else None

    @property
    def has_norm_before_decoder(self) -> bool:
        """Always false: the decoder reads the query stream's last states (`objectives/modules/permuted.py`)."""
        return False

    def encoder_weight_count(self) -> int:
        attention = 5 * self.hidden * self.hidden + 5 * self.hidden + norm_weight_count(self.hidden)
        layer = attention + feed_forward_weight_count(self.hidden, self.feed_forward)
        return self.embedding_weight_count() + self.hidden + self.layers * layer

    def small_form_fields(self, form: SmallForm) -> dict[str, object]:
        scale = form.length / self.max_length
        own = {
            "reuse": round(scale * self.reuse),
            "memory": round(scale * self.memory),
            "memory_refresh": form.memory_refresh,
        }
        return super().small_form_fields(form) | own

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        """Return transformers' format of the encoder with XLNet's head.

        Raises:
            ModelError: `heads` is not plm, the only head that XLNet has.
        """
        if heads != "plm":
            raise ModelError(
                "xlnet has no masked-language-model head, because it predicts tokens in a random order, without masks",
                remedy="use a model that was trained with masks; XLNet is exported with its own head (plm)",
            )
        return HfNetwork(ARCHITECTURE, TABLE, to_json(self))

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("xlnet", "XLNetModel", from_json),)


def _build_layer(config: XlnetConfig) -> "TwoStreamLayer":
    from encoder_core.layers.xlnet_attention import TwoStreamAttention
    from encoder_core.layers.xlnet_encoder import TwoStreamLayer

    attention = TwoStreamAttention(
        config.hidden,
        config.heads,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )
    return TwoStreamLayer(
        attention,
        config.hidden,
        config.feed_forward,
        activation=config.activation,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )


ARCHITECTURE = "XLNetLMHeadModel"  # transformers' class of encoder and head

_THEIR_LAYER = "transformer.layer.{layer}"  # prefix of transformers' names of a layer's parameters

_ATTENTION = {  # transformers' names of attention's parameters, by ours
    "query.weight": "q",
    "key.weight": "k",
    "value.weight": "v",
    "output.weight": "o",
    "distance.weight": "r",
    "distance_bias.bias": "r_r_bias",
    "segment_bias.bias": "r_s_bias",
    "content_bias.bias": "r_w_bias",
    "segment.weight": "seg_embed",
    "norm.weight": "layer_norm.weight",
    "norm.bias": "layer_norm.bias",
}

TABLE = KeyTable(  # XLNet's parameter names
    pairs=(
        NamePair("encoder.embeddings.word.weight", "transformer.word_embedding.weight"),
        NamePair("encoder.mask.weight", "transformer.mask_emb"),
        *(NamePair(f"{OUR_LAYER}.attention.{o}", f"{_THEIR_LAYER}.rel_attn.{t}") for o, t in _ATTENTION.items()),
        *weight_and_bias(f"{OUR_LAYER}.up", f"{_THEIR_LAYER}.ff.layer_1"),
        *weight_and_bias(f"{OUR_LAYER}.down", f"{_THEIR_LAYER}.ff.layer_2"),
        *weight_and_bias(f"{OUR_LAYER}.norm", f"{_THEIR_LAYER}.ff.layer_norm"),
        NamePair("head.decoder.bias", "lm_loss.bias"),
    ),
    tied=("lm_loss.weight",),
)

CONFIG_JSON = ConfigJson(
    "xlnet",
    {
        "layers": ("n_layer", 24),
        "hidden": ("d_model", 1024),
        "heads": ("n_head", 16),
        "feed_forward": ("d_inner", 4096),
        "vocab": ("vocab_size", 32_000),
        "pad_id": ("pad_token_id", 5),
        "dropout": ("dropout", 0.1),
        "initializer_range": ("initializer_range", 0.02),
        "layer_norm_eps": ("layer_norm_eps", 1e-12),
        "activation": ("ff_activation", "gelu"),
        # Our own field. Named `max_length`, transformers would drop it on saving, as a setting of text generation.
        "max_length": ("longest_row", 512),
    },
    constants={
        name: published_value(name, value)
        for name, value in (("attn_type", "bi"), ("bi_data", False), ("tie_word_embeddings", True))
    },
    unwritten={name: published_value(name, value) for name, value in (("clamp_len", -1), ("same_length", False))},
    defaults={"mem_len": 512, "reuse_len": None},
)


def to_json(config: XlnetConfig) -> dict[str, Any]:
    """Return the fields of config.json.

    transformers has a single dropout rate. The rate of attention probabilities is written as a field of our own, which
    transformers ignores.
    """
    return CONFIG_JSON.to_fields(
        config,
        mem_len=config.memory or None,
        reuse_len=config.reuse or None,
        attention_dropout=config.attention_dropout,
    )


def from_json(fields: dict[str, Any]) -> XlnetConfig:
    """Return our configuration for the fields of a config.json. Without `reuse_len` the model has no memory."""
    fields = CONFIG_JSON.fill_defaults(fields)
    return XlnetConfig(
        **CONFIG_JSON.to_settings(fields),
        attention_dropout=fields.get("attention_dropout", fields["dropout"]),
        memory=(fields["mem_len"] or 0) if fields["reuse_len"] else 0,
        reuse=fields["reuse_len"] or 0,
    )
