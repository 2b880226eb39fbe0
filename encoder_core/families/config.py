"""The base class of model configurations: the shape of a model, and the interface of a family.

A family is a configuration class in a file of this folder. It builds its encoder, maps parameters to transformers'
names, and defines its small form (`--tiny`). Other code depends on a family only for features that no other has.
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

if TYPE_CHECKING:  # torch is imported only where encoders are built, not to read a configuration
    from torch import nn

    from encoder_core.layers.any_encoder import AnyEncoder
    from encoder_core.layers.attention import AttentionKernel
    from encoder_core.layers.cross_attention import Decoder
    from encoder_core.layers.encoder import Embeddings, EncoderLayer, PreNormLayer


class EncoderConfig(BaseModel, ABC):
    """The shape of an encoder. Each family adds its own fields and methods.

    Attributes:
        name: name of the family.
        recipe: bundled recipe with the settings for continued training of a model of the family.
        pair_recipe: the same for a model that trains with a generator; None: there is no such recipe.
        main_heads: heads of the published network, from which other tasks start.
        has_decoder: whether the network is an encoder-decoder.
        permutes: whether tokens are predicted in a random order, without masks.
        context_norm: whether the detection head first adds the row's first token and normalises (`ReplacedTokenHead`).
        class_token_last: whether a text ends with the classification token; otherwise it begins with it.
        has_convolution: whether the encoder has a convolution over neighbouring tokens.
        has_generator: whether the model can train with a `generator`, for replaced-token detection.
        has_rotary_positions: whether attention rotates queries and keys by their positions (`rope_base`).
        takes_token_types: whether transformers' class accepts token types whatever `segment_count` is.
        has_length_limit: whether a table of positions limits the length of a row.
        offsets_positions_by_padding: whether positions, and so the position table's size, begin at the padding id + 1.
        biases: whether Linears and LayerNorms have biases; for the decoder, see `has_decoder_bias`.
        embedding_norm: whether a norm follows the embeddings.
        layers, hidden, heads, feed_forward: depth, width, attention heads, inner width.
        max_length: number of tokens in the longest row, including special tokens.
        vocab: number of token ids; None until the tokenizer is known (`with_tokenizer`).
        pad_id: padding id of the tokenizer, needed in transformers' format (we never pad).
        dropout, attention_dropout: dropout rates of hidden states and of attention probabilities.
        initializer_range: standard deviation of initial weights.
        initializer: distribution of initial weights (`layers/initialise.py`): normal, or normal truncated at two
            standard deviations.
        mup: muP's base, from which initial weights and learning rates are scaled to this width; None: no scaling.
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
                remedy="set model.vocab to null, or to at least the number of the tokenizer's ids",
            )
        return self.model_copy(update={"vocab": self.vocab or vocab, "pad_id": pad_id})

    def encoder(self, *, embeddings: "Embeddings | None" = None) -> "AnyEncoder":
        """Build the encoder; its weights are not yet initialised.

        Args:
            embeddings: embeddings to share with another network; None: new ones.

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
        """Build the input embeddings. `word`: word table to share with another network; None: a new one."""
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
        """Build the `distinct_layer_count` layers."""
        return encoder_layers(self, self.distinct_layer_count)

    def final_norm(self) -> "nn.Module | None":
        """Build the norm after the last layer; None: layers end with a norm themselves."""
        return None

    def decoder(self, word: "nn.Embedding") -> "Decoder":
        """Build the decoder, which attends to the encoder's states; its weights are not yet initialised. `word`: the
        encoder's word table, which the decoder shares.

        Raises:
            ModelError: the family has no decoder, or the size of the vocabulary is unknown.
        """
        raise ModelError(f"{self.name} has no decoder", remedy="use a model of family bart")

    @abstractmethod
    def hf_network(self, heads: Heads) -> HfNetwork | None:
        """Return transformers' format of the encoder with these heads; None if transformers has no class for them."""

    @classmethod
    @abstractmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        """Return the model types (`model_type` of config.json) that belong to this family."""

    def title(self, terms: Collection[str]) -> str:
        """Return the usual name of this model when it is trained with these loss terms, such as SpanBERT."""
        return self.name

    def small_form_fields(self, form: SmallForm) -> dict[str, object]:
        """Return the values of the fields that only this family changes in its small form (`--tiny`)."""
        return {}

    def paired_with(self, generator: "EncoderConfig") -> Self:
        """Return this discriminator's configuration with its generator's size set to that of `generator`.

        Raises:
            ModelError: the family has no generator.
        """
        raise ModelError(
            f"{self.name} has no generator", remedy="use a generator and a discriminator of a family with generators"
        )

    @property
    def generator(self) -> Self:
        """The configuration of the generator, a smaller model of the same family that shares the embeddings.

        Raises:
            ModelError: the family has none (`has_generator`).
        """
        raise ModelError(f"{self.name} has no generator", remedy="use a model of another family")

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a layer's queries see on each side; None: the whole row."""
        return None

    def rope_base(self, layer: int) -> float | None:
        """Return the base of a layer's rotary positions; None: the layer has no rotary positions."""
        return None

    def with_rope_base(self, base: float) -> Self:
        """Return the configuration with this base of rotary positions, if any, in layers that see the whole row."""
        return self

    def with_layers(self, layers: int) -> Self:
        """Return the configuration with this number of layers."""
        return self.model_copy(update={"layers": layers})

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings, and of the masked-language-model head's output before the decoder."""
        width: int = getattr(self, "embedding", self.hidden)
        return width

    @property
    def projects_embeddings(self) -> bool:
        """Whether a Linear projects embeddings to the width of the layers."""
        return self.embedding_width != self.hidden

    @property
    def recurrence(self) -> Recurrence | None:
        """Sizes of the memory (cached states of earlier rows); None: each row is read by itself."""
        return None

    @property
    def segment_count(self) -> int | None:
        """Number of token types (segments with embeddings); None: the family has none."""
        count: int | None = getattr(self, "token_types", None)
        return count

    @property
    def has_pair_class(self) -> bool:
        """Whether transformers has a class with a language-model head and a head for pairs of segments."""
        return False

    @property
    def distinct_layer_count(self) -> int:
        """Number of layers with separate parameters; fewer than `layers` if layers share parameters."""
        return self.layers

    @property
    def head_activation(self) -> Activation:
        """Activation of the masked-language-model head."""
        return self.activation

    @property
    def has_bare_decoder_head(self) -> bool:
        """Whether the masked-language-model head is only the decoder, the Linear to the vocabulary."""
        return False

    @property
    def head_inner_width(self) -> int | None:
        """Width between two Linears before the head's decoder; None: there is at most one Linear."""
        return None

    @property
    def has_decoder_bias(self) -> bool:
        """Whether the head's decoder has a bias."""
        return not self.has_bare_decoder_head

    @property
    def has_tied_decoder(self) -> bool:
        """Whether the head's decoder has the word embeddings as weights."""
        return True

    @property
    def has_norm_before_decoder(self) -> bool:
        """Whether the head has a norm directly before the decoder."""
        return not self.has_bare_decoder_head

    @property
    def width_settings(self) -> tuple[str, ...]:
        """The settings that are scaled like `hidden` between this model and its muP base. An embedding width that
        differs from `hidden` is not scaled."""
        scales = hasattr(self, "embedding") and self.embedding_width == self.hidden
        return ("heads", "feed_forward", "embedding") if scales else ("heads", "feed_forward")

    @property
    def output_scale(self) -> float:
        """Factor of the initial weights of projections that write to the residual stream (`ScaledLinear`)."""
        return 1.0

    @property
    def position_table_rows(self) -> int:
        """Number of rows of the input's table of positions; 0: no table."""
        return self.max_length + self.first_position if self.has_length_limit else 0

    @property
    def first_position(self) -> int:
        """Index, in the table of positions, of a row's first token; the table's earlier rows are never used."""
        return 0

    @property
    def padding_row(self) -> int | None:
        """Index of the row that is initialised to zero in the tables of words and positions; None: no such row."""
        return None

    @property
    def language_table_rows(self) -> int:
        """Number of rows of the table of languages; 0: no table."""
        return 0

    def embedding_weight_count(self) -> int:
        """Return the number of parameters of the input embeddings: all tables and their norm."""
        width = self.embedding_width
        norm = self.embedding_norm * norm_weight_count(width, self.biases)
        rows = self.vocabulary_size + self.position_table_rows + (self.segment_count or 0) + self.language_table_rows
        return rows * width + norm

    def encoder_weight_count(self) -> int:
        """Return the number of parameters of the encoder, including its embeddings."""
        projection = linear_weight_count(self.embedding_width, self.hidden) if self.projects_embeddings else 0
        layers = self.distinct_layer_count * layer_weight_count(self.hidden, self.feed_forward)
        return self.embedding_weight_count() + projection + layers

    def decoder_weight_count(self) -> int:
        """Return the number of parameters of an encoder-decoder's decoder, without the shared word table; else 0."""
        return 0

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids, `vocab`. Raises ModelError: `vocab` is None, because the tokenizer is not known."""
        if self.vocab is None:
            remedy = "take it from the tokenizer: config.with_tokenizer(vocab, pad_id)"
            raise ModelError("model.vocab is not set", remedy=remedy)
        return self.vocab


class WithGenerator(EncoderConfig):
    """A family whose generator, for replaced-token detection, has the discriminator's width and fewer layers.

    Attributes:
        generator_layers: number of layers of the generator; None: half of `layers` (DeBERTaV3, section 3.1).
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
    """Build `count` post-LayerNorm layers. `kernel`: function that returns a layer's attention kernel; None: all use
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
