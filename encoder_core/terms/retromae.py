"""RetroMAE (Xiao et al. 2022, arXiv 2205.12035), as a recipe describes it. How it is computed:
`objectives/retromae.py`.
"""

from pydantic import Field

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import layer_weights, linear_weights, norm_weights
from encoder_core.terms.term import BottleneckConfig


class RetromaeConfig(BottleneckConfig):
    """A row's text, predicted by a decoder of one layer from the vector of the row's first token and few of its words.

    Attributes:
        rate: probability with which each token of a row is hidden from a query of the decoder, for each query anew
            (paper: 0.5 to 0.7).
    """

    name = "retromae"
    reads = "first"

    rate: float = Field(default=0.5, gt=0, lt=1)

    def weights(self, model: ModelConfig) -> int:
        hidden, width = model.hidden, model.embedding_width
        projection = linear_weights(width, hidden) if width != hidden else 0
        tables = model.max_length * hidden + norm_weights(hidden)
        return tables + projection + layer_weights(hidden, model.feed_forward)
