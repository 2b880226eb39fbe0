"""How the hidden states of a text's tokens become one vector."""

from typing import Literal

Pooling = Literal["cls", "mean", "max"]
"""The class token's state; the mean, or the largest value in each dimension, over all tokens, special ones included."""
