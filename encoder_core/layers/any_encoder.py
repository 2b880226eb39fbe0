"""The encoders of all families, as one type."""

from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.encoder import Encoder
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder

AnyEncoder = Encoder | DisentangledEncoder | TwoStreamEncoder
"""An encoder: maps a batch to hidden states [T, H], and has the input embeddings as `embeddings`."""
