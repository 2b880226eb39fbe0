"""EuroBERT (Boizard et al., 2025): Llama's layers, seeing both ways. RMSNorm, SwiGLU, rotary positions, keys and values
of fewer heads than queries, no biases, a decoder with weights of its own."""

from typing import Literal, Self

from pydantic import Field, model_validator

from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.layers.encoder import Activation
from encoder_core.layers.initialise import Initializer


class EuroBertConfig(PreNormConfig):
    """See `PreNormConfig`.

    Attributes:
        key_value_heads: heads of keys and values, each shared by as many query heads; None: as many as `heads`.
        rotary_base: of the rotary positions of all layers.
    """

    family: Literal["eurobert"] = "eurobert"
    activation: Activation = "silu"
    initializer: Initializer = "normal"
    key_value_heads: int | None = Field(default=None, gt=0)
    rotary_base: float = Field(default=250_000.0, gt=0)

    @model_validator(mode="after")
    def _heads_are_shared_evenly(self) -> Self:
        if self.heads % self.shared_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of key_value_heads ({self.key_value_heads})"
            )
        return self

    @property
    def rms_norm(self) -> bool:
        return True

    @property
    def embedding_norm(self) -> bool:
        return False

    @property
    def fused(self) -> bool:
        return False

    @property
    def bare_head(self) -> bool:
        return True

    @property
    def tied(self) -> bool:
        return False

    @property
    def shared_heads(self) -> int:
        return self.key_value_heads or self.heads

    def rope_base(self, layer: int) -> float:
        return self.rotary_base

    def with_rope_base(self, base: float) -> Self:
        return self.model_copy(update={"rotary_base": base})


M210 = EuroBertConfig(layers=12, hidden=768, heads=12, feed_forward=3072, vocab=128_256)
M610 = EuroBertConfig(layers=26, hidden=1152, heads=18, key_value_heads=6, feed_forward=4096, vocab=128_256)
B2_1 = EuroBertConfig(layers=32, hidden=2304, heads=18, key_value_heads=6, feed_forward=6144, vocab=128_256)
