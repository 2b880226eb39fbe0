"""XLM (Conneau and Lample, 2019): BERT's encoder, with an embedding of the language in place of token types, and a
decoder directly on the last states."""

from typing import Literal, Self

from pydantic import Field, model_validator

from encoder_core.errors import ModelError
from encoder_core.families.config import WithGenerator, encoder_layers
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.encoder import Embeddings, Encoder
from encoder_core.layers.initialise import Initializer

FEED_FORWARD = 4  # times hidden, in the official code and in transformers' class


class XlmConfig(WithGenerator):
    """See `EncoderConfig` and `WithGenerator`.

    Attributes:
        languages: names, in the order of their embeddings. With fewer than two, the model has none.
    """

    family: Literal["xlm"] = "xlm"
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
        if self.feed_forward != FEED_FORWARD * self.hidden:
            raise ValueError(
                f"feed_forward ({self.feed_forward}) must be {FEED_FORWARD} x hidden ({FEED_FORWARD * self.hidden}): "
                "XLM has no other"
            )
        return self

    @property
    def bare_head(self) -> bool:
        return True

    @property
    def decoder_bias(self) -> bool:
        return True

    @property
    def language_table(self) -> int:
        """Rows of the table of languages; 0 for no table."""
        return len(self.languages) if len(self.languages) > 1 else 0

    def language_id(self, name: str) -> int:
        """The row of a language. Raises ModelError for one that the model does not have."""
        if name not in self.languages:
            raise ModelError(
                f"the model has no language {name!r}, but {', '.join(self.languages) or 'none'}",
                remedy="name one of these, or add the language to model.languages",
            )
        return self.languages.index(name)


XNLI15 = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
"""The languages of the published model, in the order of its configuration."""

BASE = XlmConfig(layers=12, hidden=1024, heads=8, feed_forward=4096, vocab=95_000, languages=XNLI15)


def build(
    config: XlmConfig,
    *,
    embeddings: Embeddings | None = None,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> Encoder:
    """The encoder, on `embeddings` shared with another if given; its weights not yet initialised.

    Raises ModelError if the vocabulary is unknown.
    """
    layers = encoder_layers(config, config.layers, lambda: attend)
    return Encoder(embeddings or _embeddings(config), layers, checkpoint_activations=checkpoint_activations)


def _embeddings(config: XlmConfig) -> Embeddings:
    return Embeddings(
        config.vocabulary,
        config.hidden,
        positions=config.max_length,
        languages=config.language_table,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )
