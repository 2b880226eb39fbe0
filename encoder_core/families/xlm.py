"""XLM (Conneau and Lample, 2019, arXiv 1901.07291): BERT for many languages at once.

Embeddings of the language replace token types (section 3.4, translation language modelling, puts a sentence and its
translation into one row). The decoder follows the last states directly, without a transform.

transformers' class has weights for padding, which no token uses, and adds the word embeddings of any token types that
it is given; we have no token types.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from encoder_core.errors import ModelError
from encoder_core.families.config import WithGenerator, encoder_layers
from encoder_core.families.interchange import (
    Heads,
    HfNetwork,
    KeyTable,
    ModelType,
    Pair,
    check_tied,
    unsupported,
    with_bias,
)
from encoder_core.layers.sizes import Initializer

if TYPE_CHECKING:  # torch is imported only where encoders are built: reading a configuration needs none
    from encoder_core.layers.attention import Attend
    from encoder_core.layers.encoder import Embeddings, Encoder

INNER_RATIO = 4  # inner width divided by `hidden`, fixed in the official code and in transformers' class


class XlmConfig(WithGenerator):
    """The configuration of an XLM. See `EncoderConfig` and `WithGenerator`.

    Attributes:
        languages: names of languages, in the order of their embeddings. With fewer than two, the model has no such
            embeddings.
    """

    family: Literal["xlm"] = "xlm"
    name: ClassVar[str] = "XLM"
    recipe: ClassVar[str] = "xlm-mlm-tlm-base"
    pad_id: int = Field(default=2, ge=0)
    initializer: Initializer = "normal"
    languages: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _languages_differ(self) -> Self:
        if len(set(self.languages)) < len(self.languages):
            raise ValueError(f"languages ({', '.join(self.languages)}) must differ from each other")
        return self

    @model_validator(mode="after")
    def _inner_width_is_fixed(self) -> Self:
        if self.feed_forward != INNER_RATIO * self.hidden:
            raise ValueError(
                f"feed_forward ({self.feed_forward}) must be {INNER_RATIO} x hidden ({INNER_RATIO * self.hidden}): "
                "XLM has no other"
            )
        return self

    @property
    def decoder_only_head(self) -> bool:
        return True

    @property
    def decoder_bias(self) -> bool:
        return True

    @property
    def language_rows(self) -> int:
        """Number of rows in the table of languages; 0 for no table."""
        return len(self.languages) if len(self.languages) > 1 else 0

    @property
    def position_rows(self) -> int:
        return self.max_length + self.language_rows

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

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        return HfNetwork("XLMWithLMHeadModel", table(self), to_json(self)) if heads == "mlm" else None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("xlm", "XLMModel", from_json),)


XNLI15 = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
"""The languages of the published model, in the order of its configuration."""

BASE = XlmConfig(layers=12, hidden=1024, heads=8, feed_forward=4096, vocab=95_000, languages=XNLI15)


def _embeddings(config: XlmConfig) -> "Embeddings":
    from encoder_core.layers.encoder import Embeddings

    return Embeddings(
        config.vocabulary,
        config.hidden,
        positions=config.max_length,
        languages=config.language_rows,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )


_LAYER = "encoder.layers.{layer}"
_LANGUAGES = Pair("encoder.embeddings.language.weight", "transformer.lang_embeddings.weight")
_PAIRS = (
    Pair("encoder.embeddings.word.weight", "transformer.embeddings.weight"),
    Pair("encoder.embeddings.position.weight", "transformer.position_embeddings.weight"),
    *with_bias("encoder.embeddings.norm", "transformer.layer_norm_emb"),
    *with_bias(f"{_LAYER}.attention.query", "transformer.attentions.{layer}.q_lin"),
    *with_bias(f"{_LAYER}.attention.key", "transformer.attentions.{layer}.k_lin"),
    *with_bias(f"{_LAYER}.attention.value", "transformer.attentions.{layer}.v_lin"),
    *with_bias(f"{_LAYER}.attention.output", "transformer.attentions.{layer}.out_lin"),
    *with_bias(f"{_LAYER}.attention_norm", "transformer.layer_norm1.{layer}"),
    *with_bias(f"{_LAYER}.feed_forward.up", "transformer.ffns.{layer}.lin1"),
    *with_bias(f"{_LAYER}.feed_forward.down", "transformer.ffns.{layer}.lin2"),
    *with_bias(f"{_LAYER}.feed_forward_norm", "transformer.layer_norm2.{layer}"),
    Pair("head.decoder.bias", "pred_layer.proj.bias"),
)

FIELDS = {
    "layers": "n_layers",
    "hidden": "emb_dim",
    "heads": "n_heads",
    "max_length": "max_position_embeddings",
    "vocab": "vocab_size",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "layer_norm_eps": "layer_norm_eps",
    "initializer_range": "init_std",
}
"""Our configuration fields and theirs, where only the name differs."""

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30_145,
    "emb_dim": 2048,
    "n_layers": 12,
    "n_heads": 16,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "gelu_activation": True,
    "n_langs": 1,
    "use_lang_emb": True,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "init_std": 0.02,
    "pad_token_id": 2,
    "is_encoder": True,
    "tie_word_embeddings": True,
}
"""What transformers assumes where a config.json is silent."""

_UNSUPPORTED_FLAGS = {
    "sinusoidal_embeddings": "positions must be learned",
    "causal": "attention must see both ways",
    "asm": "the decoder must be a plain one, with scores of all ids at once",
}


def table(config: XlmConfig) -> KeyTable:
    """Return the parameters, with the embeddings of languages if the model has them."""
    languages = (_LANGUAGES,) if config.language_rows else ()
    return KeyTable(
        pairs=(*_PAIRS, *languages),
        tied=("pred_layer.proj.weight",),
        unused=("transformer.position_ids",),
    )


def to_json(config: XlmConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe the model.

    Raises:
        ModelError: transformers' class does not support the activation.
    """
    if config.activation != "gelu":
        raise ModelError(
            f"model.activation is {config.activation}, but transformers' XLM supports the exact GELU only",
            remedy="train with model.activation: gelu to export",
        )
    ids = {name: number for number, name in enumerate(config.languages)}
    return {
        "model_type": "xlm",
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        "embed_init_std": config.initializer_range,
        "gelu_activation": True,
        "n_langs": max(1, len(config.languages)),
        "use_lang_emb": config.language_rows > 0,
        "lang2id": ids,
        "id2lang": {str(number): name for name, number in ids.items()},
        "pad_index": config.pad_id,
        "pad_token_id": config.pad_id,
        **dict.fromkeys(_UNSUPPORTED_FLAGS, False),
        "tie_word_embeddings": True,
    }


def from_json(fields: dict[str, Any]) -> XlmConfig:
    """Return our configuration for the fields of a config.json. Languages without names are named by their numbers.

    Raises:
        ModelError: the model has features that we do not support.
    """
    fields = DEFAULTS | fields
    check_tied(fields)
    for name, remedy in _UNSUPPORTED_FLAGS.items():
        if fields.get(name):
            raise unsupported(name, fields, remedy)
    for name in ("gelu_activation", "is_encoder"):
        if not fields[name]:
            raise unsupported(name, fields, "only encoders with GELU can be loaded")
    return XlmConfig(
        **{ours: fields[theirs] for ours, theirs in FIELDS.items()},
        feed_forward=INNER_RATIO * fields["emb_dim"],
        # transformers 4 reads and writes `pad_index`; 5 writes the same as `pad_token_id`, and null for none.
        pad_id=next(
            id_
            for id_ in (fields.get("pad_index"), fields["pad_token_id"], DEFAULTS["pad_token_id"])
            if id_ is not None
        ),
        languages=_languages(fields),
    )


_MAX_LANGUAGES = 100_000
"""More than there are. Each becomes a name, so an absurd number would fill the memory."""


def _languages(fields: dict[str, Any]) -> tuple[str, ...]:
    count, names = fields["n_langs"], {number: name for name, number in (fields.get("lang2id") or {}).items()}
    if count > _MAX_LANGUAGES:
        raise unsupported("n_langs", fields, f"at most {_MAX_LANGUAGES:,} languages can be loaded")
    if not fields["use_lang_emb"] or count < 2:
        return tuple(names.values()) if len(names) == 1 else ()
    return tuple(str(names.get(number, number)) for number in range(count))
