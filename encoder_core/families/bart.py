"""BART (Lewis et al., 2019, arXiv 1910.13461): an encoder reads corrupted text, and a decoder writes the text.

Encoder and decoder are those of Vaswani et al. (2017) with learned positions, GELU, and a LayerNorm after the
embeddings (section 2.1; facebookresearch/fairseq, models/bart/model.py). Encoder, decoder and output projection share
the word table. The output projection follows the decoder's last layer directly, and has no bias. The loss term denoise
trains the network.

transformers' class has an output bias that is never trained, and is zero in the published weights. It can have dropout
inside the feed-forward blocks, which fairseq (`relu_dropout` 0) and we do not have.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from encoder_core.errors import ModelError
from encoder_core.families.config import EncoderConfig, encoder_layers
from encoder_core.families.config_json import TIED_DECODER_CONSTANT, ConfigJson
from encoder_core.families.interchange import Heads, HfNetwork, KeyTable, ModelType, NamePair, weight_and_bias
from encoder_core.layers.sizes import Initializer, layer_weight_count, linear_weight_count, norm_weight_count

if TYPE_CHECKING:  # torch is imported only where encoders are built, not to read a configuration
    from torch import nn

    from encoder_core.layers.cross_attention import Decoder


class BartConfig(EncoderConfig):
    """The configuration of a BART. See `EncoderConfig`. The encoder and the decoder have `layers` layers each."""

    family: Literal["bart"] = "bart"
    name: ClassVar[str] = "BART"
    recipe: ClassVar[str] = "bart-base"
    main_heads: ClassVar[Heads] = "denoise"
    has_decoder: ClassVar[bool] = True
    max_length: int = 1024
    pad_id: int = 1
    attention_dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    initializer: Initializer = "normal"

    def decoder(self, word: "nn.Embedding") -> "Decoder":
        from encoder_core.layers.cross_attention import CrossAttention, Decoder, DecoderLayer

        layers = [
            DecoderLayer(
                layer.attention,
                CrossAttention(self.hidden, self.heads, self.attention_dropout),
                layer.feed_forward,
                self.hidden,
                eps=self.layer_norm_eps,
                dropout=self.dropout,
            )
            for layer in encoder_layers(self, self.layers)
        ]
        return Decoder(self.input_embeddings(word), layers)

    @property
    def has_bare_decoder_head(self) -> bool:
        return True

    @property
    def first_position(self) -> int:
        """Always 2, whatever the padding id, as in transformers' class and fairseq's models."""
        return 2

    @property
    def padding_row(self) -> int | None:
        return self.pad_id if self.pad_id < self.first_position else None

    def decoder_weight_count(self) -> int:
        across = 4 * linear_weight_count(self.hidden, self.hidden) + norm_weight_count(self.hidden)
        tables = self.embedding_weight_count() - self.vocabulary_size * self.hidden
        return tables + self.layers * (layer_weight_count(self.hidden, self.feed_forward) + across)

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        """Return transformers' format of encoder and decoder.

        Raises:
            ModelError: `heads` is not denoise, the only head that BART has.
        """
        if heads != "denoise":
            raise ModelError(
                f"bart has no head {heads!r}: its only head is that of its decoder (denoise)",
                remedy="use a model of another family, or BART with the head denoise",
            )
        return HfNetwork("BartForConditionalGeneration", TABLE, to_json(self))

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("bart", "BartModel", from_json),)


_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}  # transformers' by ours


def _stack_pairs(our_prefix: str, their_prefix: str, attention_names: dict[str, str]) -> tuple[NamePair, ...]:
    """Return the pairs of names of an encoder or decoder, without the word table. `attention_names`: theirs by ours."""
    layer, their = f"{our_prefix}.layers.{{layer}}", f"{their_prefix}.layers.{{layer}}"
    projections = [
        (f"{layer}.{name}.{part}", f"{their}.{its}.{proj}")
        for name, its in attention_names.items()
        for part, proj in _ATTENTION.items()
    ]
    norms = [(f"{layer}.{name}_norm", f"{their}.{its}_layer_norm") for name, its in attention_names.items()]
    modules = [
        (f"{our_prefix}.embeddings.norm", f"{their_prefix}.layernorm_embedding"),
        *projections,
        *norms,
        (f"{layer}.feed_forward.up", f"{their}.fc1"),
        (f"{layer}.feed_forward.down", f"{their}.fc2"),
        (f"{layer}.feed_forward_norm", f"{their}.final_layer_norm"),
    ]
    position = NamePair(f"{our_prefix}.embeddings.position.weight", f"{their_prefix}.embed_positions.weight")
    return (position, *(pair for names in modules for pair in weight_and_bias(*names)))


TABLE = KeyTable(  # BART's parameter names
    pairs=(
        NamePair("encoder.embeddings.word.weight", "model.shared.weight"),
        *_stack_pairs("encoder", "model.encoder", {"attention": "self_attn"}),
        *_stack_pairs("decoder", "model.decoder", {"attention": "self_attn", "across": "encoder_attn"}),
    ),
    tied=("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"),
    zero=("final_logits_bias",),
)

# Transformers' fields for the decoder's shape, and our fields, which hold for encoder and decoder.
_DECODER = {"decoder_layers": "layers", "decoder_attention_heads": "heads", "decoder_ffn_dim": "feed_forward"}

EPSILON = 1e-5  # epsilon of every LayerNorm; transformers' configuration has no field for it

_PUBLISHED_REMEDY = "use weights of BART's published architecture (mBART and Pegasus differ from it)"
CONFIG_JSON = ConfigJson(
    "bart",
    {
        "layers": ("encoder_layers", 12),
        "hidden": ("d_model", 1024),
        "heads": ("encoder_attention_heads", 16),
        "feed_forward": ("encoder_ffn_dim", 4096),
        "max_length": ("max_position_embeddings", 1024),
        "vocab": ("vocab_size", 50_265),
        "pad_id": ("pad_token_id", 1),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.0),
        "initializer_range": ("init_std", 0.02),
        "activation": ("activation_function", "gelu"),
    },
    constants={**TIED_DECODER_CONSTANT, "scale_embedding": (False, _PUBLISHED_REMEDY)},
    # Only old files have these fields, which select another order of norms.
    unwritten=dict.fromkeys(("normalize_before", "add_final_layer_norm"), (False, _PUBLISHED_REMEDY)),
    defaults={"decoder_layers": 12, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096},
)


def to_json(config: BartConfig) -> dict[str, Any]:
    """Return the fields of config.json. Raises ModelError: the LayerNorm epsilon is not 1e-5."""
    if config.layer_norm_eps != EPSILON:
        raise ModelError(
            f"model.layer_norm_eps is {config.layer_norm_eps:g}, but transformers' BART only supports 1e-5",
            remedy="train with model.layer_norm_eps: 1e-5 to export",
        )
    decoder = {theirs: getattr(config, ours) for theirs, ours in _DECODER.items()}
    return CONFIG_JSON.to_fields(config, is_encoder_decoder=True, activation_dropout=0.0, **decoder)


def from_json(fields: dict[str, Any]) -> BartConfig:
    """Return our configuration for the fields of a config.json. Raises ModelError: encoder and decoder differ."""
    fields = CONFIG_JSON.fill_defaults(fields)
    for theirs, ours in _DECODER.items():
        encoders = CONFIG_JSON.fields[ours][0]
        if fields[theirs] != fields[encoders]:
            raise ModelError(
                f"config.json: {theirs} is {fields[theirs]}, but {encoders} is {fields[encoders]}",
                remedy="use a model whose encoder and decoder have the same shape",
            )
    return BartConfig(**CONFIG_JSON.to_settings(fields), layer_norm_eps=EPSILON)
