"""Names and sizes of layers and heads, in a file of their own, so that reading a recipe and counting its parameters
does not import torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Activation = Literal["gelu", "gelu_tanh", "silu"]
"""GELU with the error function, GELU with the official BERT's tanh approximation, or SiLU, x sigmoid(x)."""

Initializer = Literal["truncated_normal", "normal"]
"""Distribution of initial weights (`initialise.py`)."""


def log_buckets(buckets: int, longest: int) -> tuple[int, ...]:
    """Return the bucket of each distance 0 .. longest - 1 (microsoft/DeBERTa, da_utils.py).

    Distances up to half of `buckets` have buckets of their own; larger ones share buckets logarithmically, so that
    longest - 1 has the last bucket.
    """
    exact = buckets // 2
    if longest - 1 <= exact:
        return tuple(range(longest))
    whole = math.log((longest - 1) / exact)
    return tuple(
        d if d <= exact else math.ceil(math.log(d / exact) / whole * (exact - 1)) + exact for d in range(longest)
    )


def linear_weight_count(inputs: int, outputs: int, bias: bool = True) -> int:
    """Return the number of parameters of a Linear."""
    return (inputs + bias) * outputs


def norm_weight_count(width: int, bias: bool = True) -> int:
    """Return the number of parameters of a LayerNorm, or of an RMSNorm (without bias)."""
    return (1 + bias) * width


def feed_forward_weight_count(hidden: int, inner: int) -> int:
    """Return the number of parameters of a feed-forward block and its LayerNorm."""
    return linear_weight_count(hidden, inner) + linear_weight_count(inner, hidden) + norm_weight_count(hidden)


def layer_weight_count(hidden: int, inner: int) -> int:
    """Return the number of parameters of a post-LayerNorm layer: attention, feed-forward block, LayerNorms."""
    return (
        4 * linear_weight_count(hidden, hidden) + norm_weight_count(hidden) + feed_forward_weight_count(hidden, inner)
    )


DECODER_PASSES = 2  # microsoft/DeBERTa, masked_language_model.py
"""Number of times that DeBERTa's mask decoder applies the last layer."""

SPAN_POSITION_WIDTH = 200
"""SpanBERT: width of the embedding of a token's position in its span."""

MAX_SPAN_TARGETS = 15
"""SpanBERT: largest number of tokens of a span that are predicted from its boundary (official code)."""

GPU_DEVICE_TYPES = ("cuda", "meta")
"""Device types for which layers take the code path of a GPU: GPUs, and the meta device, on which a GPU's cost is
counted (`planned.py`)."""

CHUNK_LOGITS = {"cuda": 2**27, "meta": 2**27, "cpu": 2**24}  # most logits in memory at once, by device: 512 or 64 MiB


@dataclass(frozen=True)
class Recurrence:
    """XLNet's memory, a cache of states of earlier tokens: the first `reuse` tokens of each row are appended, and the
    last `length` tokens are kept. In training it is recomputed every `refresh_steps` steps."""

    reuse: int
    length: int
    refresh_steps: int


@dataclass(frozen=True)
class SmallForm:
    """The sizes to which `--tiny` shrinks a recipe's models. Each family uses the values for the settings that it has.

    Attributes:
        length: number of tokens in the longest row.
        drops: whether dropout rates are kept; otherwise they are 0.
        layers, hidden, heads, embedding: depth, width, attention heads and width of embeddings.
        window: number of tokens in a local layer's window.
        buckets: rows of DeBERTa's table of distances in each direction.
        memory_refresh: number of steps after which XLNet's memory is recomputed.
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


class Mup(BaseModel):
    """The base of muP: the narrower model for which a recipe's learning rate and initialisation are meant.

    The base has the model's depth and head width. `encoder_core/objectives/modules/mup.py` computes each parameter's
    factors.

    Attributes:
        hidden: width of the base's hidden states.
        feed_forward: inner width of the base; None: in proportion to `hidden`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden: int = Field(gt=0)
    feed_forward: int | None = Field(default=None, gt=0)
