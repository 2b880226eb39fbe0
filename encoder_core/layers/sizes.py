"""Names and sizes of layers and heads. They are apart from the modules, so that reading a recipe and counting its
parameters does not import torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Activation = Literal["gelu", "gelu_tanh", "silu"]
"""GELU by the error function or by the tanh approximation of the official BERT, or SiLU: x sigmoid(x)."""

Initializer = Literal["truncated_normal", "normal"]
"""Distribution of fresh weights (`initialise.py`)."""


def log_buckets(buckets: int, longest: int) -> tuple[int, ...]:
    """Return the bucket of each distance 0 .. longest - 1.

    It is the distance itself up to half of `buckets`, then logarithmic, so that longest - 1 has the last bucket
    (microsoft/DeBERTa, da_utils.py).
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
    """Return the number of parameters of a norm."""
    return (1 + bias) * width


def feed_forward_weight_count(hidden: int, inner: int) -> int:
    """Return the number of parameters of a feed-forward block and its LayerNorm."""
    return linear_weight_count(hidden, inner) + linear_weight_count(inner, hidden) + norm_weight_count(hidden)


def layer_weight_count(hidden: int, inner: int) -> int:
    """Return the number of parameters of a post-LayerNorm layer."""
    return (
        4 * linear_weight_count(hidden, hidden) + norm_weight_count(hidden) + feed_forward_weight_count(hidden, inner)
    )


DECODER_PASSES = 2  # microsoft/DeBERTa, masked_language_model.py
"""How often DeBERTa's mask decoder runs the last layer."""

SPAN_POSITION_WIDTH = 200
"""Width of the embedding of a token's place in its span."""

MAX_SPAN_TARGETS = 15
"""Largest number of tokens of one span that are predicted from its boundary (official code)."""

GPU_DEVICE_TYPES = ("cuda", "meta")
"""Kinds of device on which layers take the path of a GPU: a GPU, and tensors without numbers that stand for a GPU's
(`planned.py`)."""

CHUNK_LOGITS = {"cuda": 2**27, "meta": 2**27, "cpu": 2**24}  # by device: 512 and 64 MiB in fp32


@dataclass(frozen=True)
class Recurrence:
    """The cache of states of earlier rows: the first `reuse` tokens of each row join it, and it keeps the last `length`
    tokens. In training it is recomputed every `refresh_steps` steps."""

    reuse: int
    length: int
    refresh_steps: int


@dataclass(frozen=True)
class SmallForm:
    """The shape of a recipe's small form. Each family takes the values for the settings that it has.

    Attributes:
        length: number of tokens in the longest row.
        drops: whether dropout is kept; otherwise its rates are 0.
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
    """The base of muP: the narrower model whose learning rates and fresh weights a recipe states.

    It has the depth of the model, and heads of the same width. What follows for each parameter is computed in
    `encoder_core/objectives/mup.py`.

    Attributes:
        hidden: width of the base's hidden states.
        feed_forward: inner width of the base; None: in proportion to `hidden`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden: int = Field(gt=0)
    feed_forward: int | None = Field(default=None, gt=0)
