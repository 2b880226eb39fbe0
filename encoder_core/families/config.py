"""The base class of model configurations: the shape of a model, and the interface of a family.

A family is a class of configurations in a file of this folder. It builds its encoder, gives transformers' names, and
defines its small form. Other code does not ask for a model's family, except for features that only one family has.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from encoder_core.errors import ModelError
from encoder_core.families.interchange import Heads, HfNetwork, ModelType
from encoder_core.layers.sizes import (
    Activation,
    Initializer,
    Mup,
    Recurrence,
    SmallForm,
    layer_weight_count,
    linear_weight_count,
    norm_weight_count,
)

if TYPE_CHECKING:  # torch is imported only where encoders are built: reading a configuration needs none
    from torch import nn

    from encoder_core.layers.any_encoder import AnyEncoder
    from encoder_core.layers.attention import AttentionKernel
    from encoder_core.layers.cross_attention import Decoder
    from encoder_core.layers.encoder import Embeddings, EncoderLayer, PreNormLayer


class EncoderConfig(BaseModel, ABC):
    """The shape of an encoder. Each family adds its own fields and methods.

    Attributes:
        name: name of the family.
        recipe: bundled recipe with the settings for continuing a model of the family; `pair_recipe`: with a generator.
        main_heads: heads of the network that other tasks start from.
        has_decoder: whether the network is an encoder and a decoder that reads its states.
        permutes: whether tokens are predicted in a random order, without masks.
        context_norm: whether the detection head has a norm of its own.
        class_token_last: whether the classification token ends a text; else it begins it.
        has_convolution: whether a convolution shows each token its neighbours.
        has_generator: whether the model trains beside a `generator`, for replaced-token detection.
        has_rotary_positions: whether attention turns queries and keys by their positions (`rope_base`).
        takes_token_types: whether transformers' class accepts them for any number of `segment_count`.
        has_length_limit: whether a table of positions limits the length of a row.
        offsets_positions_by_padding: whether positions begin after the padding id, so that the parameters depend on it.
        biases: whether Linears and LayerNorms have biases; `has_decoder_bias` answers for the decoder.
        embedding_norm: whether a norm follows the embeddings.
        layers, hidden, heads, feed_forward: depth, width, attention heads, inner width.
        max_length: number of tokens in the longest row, including special tokens.
        vocab: number of token ids; None until the tokenizer is known (`with_tokenizer`).
        pad_id: padding id of the tokenizer, for interchange (we never pad).
        dropout, attention_dropout: dropout rates of hidden states and of attention probabilities.
        initializer_range: standard deviation of fresh weights.
        initializer: distribution of fresh weights (`layers/initialise.py`): normal, or normal truncated at two
            standard deviations.
        mup: the base from which fresh weights and learning rates are scaled to this width; None: they are not scaled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    recipe: ClassVar[str]
    pair_recipe: ClassVar[str | None] = None
    main_heads: ClassVar[Heads] = "mlm"
    has_decoder: ClassVar[bool] = False
    permutes: ClassVar[bool] = False
    context_norm: ClassVar[bool] = False
    class_token_last: ClassVar[bool] = False
    takes_token_types: ClassVar[bool] = False
    has_generator: ClassVar[bool] = False
    has_rotary_positions: ClassVar[bool] = False
    has_length_limit: ClassVar[bool] = True
    offsets_positions_by_padding: ClassVar[bool] = False
    biases: ClassVar[bool] = True
    embedding_norm: ClassVar[bool] = True

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
    mup: Mup | None = Field(default=None, exclude_if=lambda mup: mup is None)

    @property
    def has_convolution(self) -> bool:
        return getattr(self, "convolution", None) is not None

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        return self

    def with_tokenizer(self, vocab: int, pad_id: int) -> Self:
        """Return this configuration for a tokenizer of `vocab` ids.

        Raises:
            ModelError: the model has fewer ids than the tokenizer.
        """
        if self.vocab is not None and self.vocab < vocab:
            raise ModelError(
                f"model.vocab is {self.vocab}, but the tokenizer has {vocab} ids",
                remedy="set model.vocab to null, or to at least the tokenizer's size",
            )
        return self.model_copy(update={"vocab": self.vocab or vocab, "pad_id": pad_id})

    def encoder(self, *, embeddings: "Embeddings | None" = None) -> "AnyEncoder":
        """Build the encoder; its weights are not yet initialised.

        Args:
            embeddings: embeddings to share with another network; None: its own.

        Raises:
            ModelError: the size of the vocabulary is unknown.
        """
        from torch import nn

        from encoder_core.layers.encoder import Encoder

        return Encoder(
            embeddings or self.input_embeddings(),
            self.encoder_layers(),
            schedule=[int(depth / (self.layers / self.distinct_layer_count)) for depth in range(self.layers)],
            projection=nn.Linear(self.embedding_width, self.hidden) if self.projects_embeddings else None,
            final_norm=self.final_norm(),
        )

    def input_embeddings(self, word: "nn.Embedding | None" = None) -> "Embeddings":
        """Build the tables at the input, which the properties below describe. `word`: a table of words to share."""
        from encoder_core.layers.encoder import Embeddings

        return Embeddings(
            self.vocabulary_size,
            self.embedding_width,
            positions=self.position_table_rows,
            first_position=self.first_position,
            token_types=self.segment_count or 0,
            languages=self.language_table_rows,
            padding=self.padding_row,
            norm_bias=self.biases,
            eps=self.layer_norm_eps if self.embedding_norm else None,
            dropout=self.dropout,
            word=word,
        )

    def encoder_layers(self) -> "Sequence[EncoderLayer | PreNormLayer]":
        """Build the layers, `distinct_layer_count` of them."""
        return encoder_layers(self, self.distinct_layer_count)

    def final_norm(self) -> "nn.Module | None":
        """Build the norm behind the last layer; None: the layers end with one themselves."""
        return None

    def decoder(self, word: "nn.Embedding") -> "Decoder":
        """Build the decoder that reads the encoder's states; its weights are not yet initialised. `word`: the encoder's
        table of words.

        Raises:
            ModelError: the family has no decoder, or the size of the vocabulary is unknown.
        """
        raise ModelError(f"{self.name} has no decoder", remedy="use a model of family bart")

    @abstractmethod
    def hf_network(self, heads: Heads) -> HfNetwork | None:
        """Return how transformers' class holds the encoder with these heads; None if there is no such class."""

    @classmethod
    @abstractmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        """Return the model types of transformers that belong to this family."""

    def title(self, terms: Collection[str]) -> str:
        """Return the name by which the model is known when it is trained with the loss terms `terms`."""
        return self.name

    def small_form_fields(self, form: SmallForm) -> dict[str, object]:
        """Return the fields that only this family changes in the small form of a recipe."""
        return {}

    def paired_with(self, generator: "EncoderConfig") -> Self:
        """Return this discriminator with the size of its generator.

        Raises:
            ModelError: the family has no generator.
        """
        raise ModelError(
            f"{self.name} has no generator", remedy="give a generator and a discriminator of another family"
        )

    @property
    def generator(self) -> Self:
        """The generator, as a model of its own: a smaller one of the same family that shares the embeddings.

        Raises:
            ModelError: the family has none (`has_generator`).
        """
        raise ModelError(f"{self.name} has no generator", remedy="use a model of another family")

    def window(self, layer: int) -> int | None:
        """Return how many tokens a layer sees on each side; None: the whole row."""
        return None

    def rope_base(self, layer: int) -> float | None:
        """Return the base of a layer's rotary positions; None if it has none."""
        return None

    def with_rope_base(self, base: float) -> Self:
        """Return the same model with another base in the layers that see the whole row; itself if it has none."""
        return self

    def with_layers(self, layers: int) -> Self:
        """Return the same model with another depth."""
        return self.model_copy(update={"layers": layers})

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings; the masked-language-model head works in it too."""
        width: int = getattr(self, "embedding", self.hidden)
        return width

    @property
    def projects_embeddings(self) -> bool:
        """Whether a Linear projects embeddings to the width of the layers."""
        return self.embedding_width != self.hidden

    @property
    def recurrence(self) -> Recurrence | None:
        """The cache of states of earlier rows; None if each row is read alone."""
        return None

    @property
    def segment_count(self) -> int | None:
        """Number of segments that have embeddings of their own; None if the family has none."""
        count: int | None = getattr(self, "token_types", None)
        return count

    @property
    def has_pair_class(self) -> bool:
        """Whether transformers has a class with a language-model head and a head for pairs of segments."""
        return False

    @property
    def distinct_layer_count(self) -> int:
        """Number of layers with parameters of their own."""
        return self.layers

    @property
    def head_activation(self) -> Activation:
        """Activation of the masked-language-model head."""
        return self.activation

    @property
    def has_bare_decoder_head(self) -> bool:
        """Whether the masked-language-model head consists of the decoder alone."""
        return False

    @property
    def head_inner_width(self) -> int | None:
        """Inner width of the head's two Linears; None: it has one, or none (`has_bare_decoder_head`)."""
        return None

    @property
    def has_decoder_bias(self) -> bool:
        """Whether the decoder has a bias."""
        return not self.has_bare_decoder_head

    @property
    def has_tied_decoder(self) -> bool:
        """Whether the decoder's weights are the word embeddings."""
        return True

    @property
    def has_norm_before_decoder(self) -> bool:
        """Whether the head of token ids has a norm of its own, directly before the decoder."""
        return not self.has_bare_decoder_head

    @property
    def width_settings(self) -> tuple[str, ...]:
        """The settings that grow in proportion to `hidden` from a base of muP to this model. Embeddings of a width of
        their own keep it.
        """
        own = hasattr(self, "embedding") and self.embedding_width == self.hidden
        return ("heads", "feed_forward", "embedding") if own else ("heads", "feed_forward")

    @property
    def output_scale(self) -> float:
        """Scale of fresh weights that write to the hidden states (`layers/parameters.py`, ScaledLinear)."""
        return 1.0

    @property
    def position_table_rows(self) -> int:
        """Rows of the table of positions at the input; 0 for no table."""
        return self.max_length + self.first_position if self.has_length_limit else 0

    @property
    def first_position(self) -> int:
        """Row of the table of positions for the first token of a row; the rows before it are never used."""
        return 0

    @property
    def padding_row(self) -> int | None:
        """Row of the tables of words and positions that is initialised to zero; None for no such row."""
        return None

    @property
    def language_table_rows(self) -> int:
        """Number of rows in the table of languages; 0 for no table."""
        return 0

    def embedding_weight_count(self) -> int:
        """Return the number of parameters of all tables at the input and their norm."""
        width = self.embedding_width
        norm = self.embedding_norm * norm_weight_count(width, self.biases)
        rows = self.vocabulary_size + self.position_table_rows + (self.segment_count or 0) + self.language_table_rows
        return rows * width + norm

    def encoder_weight_count(self) -> int:
        """Return the number of parameters of the encoder with its tables."""
        projection = linear_weight_count(self.embedding_width, self.hidden) if self.projects_embeddings else 0
        layers = self.distinct_layer_count * layer_weight_count(self.hidden, self.feed_forward)
        return self.embedding_weight_count() + projection + layers

    def decoder_weight_count(self) -> int:
        """Return the number of parameters of the decoder that the embeddings do not hold; 0 without one."""
        return 0

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids, `vocab`.

        Raises:
            ModelError: `vocab` is not set yet.
        """
        if self.vocab is None:
            remedy = "take it from the tokenizer: config.with_tokenizer(vocab, pad_id)"
            raise ModelError("model.vocab is not set", remedy=remedy)
        return self.vocab


class WithGenerator(EncoderConfig):
    """A family whose generator, for replaced-token detection, is as wide as the model itself and less deep.

    Attributes:
        generator_layers: depth of the generator; None: half of this network's (DeBERTaV3, section 3.1).
    """

    has_generator: ClassVar[bool] = True
    generator_layers: int | None = Field(default=None, gt=0, exclude_if=lambda layers: layers is None)

    @property
    def generator(self) -> Self:
        layers = self.generator_layers or max(1, self.layers // 2)
        return self.model_copy(update={"layers": layers, "generator_layers": None})

    def paired_with(self, generator: EncoderConfig) -> Self:
        return self.model_copy(update={"generator_layers": generator.layers})

    def small_form_fields(self, form: SmallForm) -> dict[str, object]:
        return super().small_form_fields(form) | {"generator_layers": self.generator_layers and 1}


def encoder_layers(
    config: EncoderConfig, count: int, kernel: "Callable[[], AttentionKernel] | None" = None
) -> "list[EncoderLayer]":
    """Return `count` post-LayerNorm layers of the model's shape, each with its own `kernel()`; None:
    `attend_with_best_kernel`."""
    from encoder_core.layers.attention import SelfAttention, attend_with_best_kernel
    from encoder_core.layers.encoder import EncoderLayer, FeedForward

    return [
        EncoderLayer(
            SelfAttention(
                config.hidden,
                config.heads,
                config.attention_dropout,
                kernel() if kernel else attend_with_best_kernel,
            ),
            FeedForward(config.hidden, config.feed_forward, config.activation),
            config.hidden,
            eps=config.layer_norm_eps,
            dropout=config.dropout,
        )
        for _ in range(count)
    ]
