"""What every model has: its shape, and what the rest of the system asks of a family.

A family is a class of configurations in a file of this folder. It builds its encoder, says how transformers names it,
and what its small form is. Nothing else asks which family a model is of, but for what only one family has."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from encoder_core.errors import ModelError
from encoder_core.families.interchange import Format, Heads, Written
from encoder_core.layers.attention import Attend, SelfAttention, automatic
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.encoder import Activation, Embeddings, Encoder, EncoderLayer, FeedForward
from encoder_core.layers.initialise import Initializer
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder

AnyEncoder = Encoder | DisentangledEncoder | TwoStreamEncoder
"""Batch to hidden states [T, H], with the input embeddings as `embeddings`."""


@dataclass(frozen=True)
class SmallForm:
    """The shape that a recipe's model is shrunk to. Which of the settings a family has, it says itself.

    Attributes:
        length: of the longest row, in tokens.
        drops: whether dropout stays as it is; otherwise there is none.
        layers, hidden, heads, embedding: of the small model.
        window, buckets: tokens of a local layer's window; rows of DeBERTa's table of distances each way.
        memory_refresh: steps after which XLNet's memory is made again.
    """

    length: int
    drops: bool
    layers: int
    hidden: int
    heads: int
    embedding: int
    window: int
    buckets: int
    memory_refresh: int


class EncoderConfig(BaseModel, ABC):
    """The shape of an encoder; each family adds its own fields, and answers for itself.

    Attributes:
        name: what the family is called.
        recipe: the bundled recipe whose settings a model of the family goes on with; `pair_recipe` with a generator.
        main_heads: of the network that goes on to other tasks.
        layers, hidden, heads, feed_forward: depth, width, attention heads, inner width.
        max_length: longest row in tokens, special tokens included.
        vocab: number of token ids; None until the tokenizer is known (`with_tokenizer`).
        pad_id: the tokenizer's padding id, for interchange (we never pad).
        dropout, attention_dropout: on hidden states and on attention probabilities.
        initializer_range: standard deviation of fresh weights.
        initializer: the distribution of fresh weights (`layers/initialise.py`): normal, or normal cut at two standard
            deviations.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    recipe: ClassVar[str]
    pair_recipe: ClassVar[str | None] = None
    main_heads: ClassVar[Heads] = "mlm"

    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    feed_forward: int = Field(gt=0)
    max_length: int = Field(default=512, gt=1)
    vocab: int | None = Field(default=None, gt=0)
    pad_id: int = Field(default=0, ge=0)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    attention_dropout: float = Field(default=0.1, ge=0, lt=1)
    activation: Activation = "gelu"
    layer_norm_eps: float = Field(default=1e-12, gt=0)
    initializer_range: float = Field(default=0.02, gt=0)
    initializer: Initializer = "truncated_normal"

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        return self

    def with_tokenizer(self, vocab: int, pad_id: int) -> Self:
        """This configuration for a tokenizer of `vocab` ids.

        Raises ModelError if the model is smaller than that.
        """
        if self.vocab is not None and self.vocab < vocab:
            raise ModelError(
                f"model.vocab is {self.vocab}, but the tokenizer has {vocab} ids",
                remedy="leave model.vocab out, or set it to at least the tokenizer's size",
            )
        return self.model_copy(update={"vocab": self.vocab or vocab, "pad_id": pad_id})

    @abstractmethod
    def encoder(
        self,
        *,
        embeddings: Embeddings | None = None,
        checkpoint_activations: bool = False,
        attend: Attend = automatic,
    ) -> AnyEncoder:
        """The encoder, on `embeddings` shared with another network if given; its weights not yet initialised. `attend`
        is the kernel of plain attention.

        Raises ModelError if the vocabulary is unknown.
        """

    @abstractmethod
    def written(self, heads: Heads) -> Written | None:
        """The class of transformers that holds the encoder with these heads; None if there is none."""

    @classmethod
    @abstractmethod
    def formats(cls) -> tuple[Format, ...]:
        """The types of model in transformers that are of this family."""

    def title(self, terms: Collection[str]) -> str:
        """The name that the model is known by when it is trained by `terms`."""
        return self.name

    def small(self, form: SmallForm) -> dict[str, object]:
        """What only this family changes in the small form of a recipe."""
        return {}

    def with_layers(self, layers: int) -> Self:
        """The same model with another depth."""
        return self.model_copy(update={"layers": layers})

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings, in which the masked-language-model head works too."""
        return self.hidden

    @property
    def projects_embeddings(self) -> bool:
        """Whether a Linear brings embeddings to the width of the layers."""
        return self.embedding_width != self.hidden

    @property
    def bounded(self) -> bool:
        """Whether a table of positions bounds a row's length."""
        return True

    @property
    def counts_from_padding(self) -> bool:
        """Whether positions begin behind the padding id, so that parameters depend on it."""
        return False

    @property
    def distinct_layers(self) -> int:
        """Layers with parameters of their own."""
        return self.layers

    @property
    def head_activation(self) -> Activation:
        """Activation of the masked-language-model head."""
        return self.activation

    @property
    def biases(self) -> bool:
        """Whether Linears and LayerNorms have biases; of the decoder `decoder_bias` says it."""
        return True

    @property
    def bare_head(self) -> bool:
        """Whether the masked-language-model head is a decoder alone."""
        return False

    @property
    def decoder_bias(self) -> bool:
        """Whether the decoder has a bias."""
        return not self.bare_head

    @property
    def tied(self) -> bool:
        """Whether that decoder's weights are the word embeddings."""
        return True

    @property
    def output_scale(self) -> float:
        """Of fresh weights that write to the hidden states (`layers/parameters.py`, ScaledLinear)."""
        return 1.0

    @property
    def vocabulary(self) -> int:
        """`vocab`, known. Raises ModelError while it is not."""
        if self.vocab is None:
            raise ModelError(
                "model.vocab is not set",
                remedy="take it from the tokenizer: config.with_tokenizer(vocab, pad_id)",
            )
        return self.vocab


class WithGenerator(EncoderConfig):
    """A family whose generator, where replaced tokens are detected, is as wide as itself and less deep.

    Attributes:
        generator_layers: depth of the generator; None for half of this network's (DeBERTaV3, section 3.1). While it is
            None it stays out of what is written: recipes had no such key at first.
    """

    generator_layers: int | None = Field(default=None, gt=0)

    @property
    def generator(self) -> Self:
        """The generator, as a model in its own right."""
        layers = self.generator_layers or max(1, self.layers // 2)
        return self.model_copy(update={"layers": layers, "generator_layers": None})

    def small(self, form: SmallForm) -> dict[str, object]:
        return {"generator_layers": self.generator_layers and 1}

    @model_serializer(mode="wrap")
    def _unspoken(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields = serialize(self)
        return {name: value for name, value in fields.items() if name != "generator_layers" or value}


def encoder_layers(config: EncoderConfig, count: int, kernel: Callable[[], Attend]) -> list[EncoderLayer]:
    """`count` post-LayerNorm layers of the configuration's shape, each with a `kernel()` of its own."""
    return [
        EncoderLayer(
            SelfAttention(config.hidden, config.heads, config.attention_dropout, kernel()),
            FeedForward(config.hidden, config.feed_forward, config.activation),
            config.hidden,
            eps=config.layer_norm_eps,
            dropout=config.dropout,
        )
        for _ in range(count)
    ]
