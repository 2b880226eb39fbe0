"""ModernBERT (Warner et al., 2024): pre-norm, rotary positions, GeGLU, no biases, local attention in most layers."""

import math
from typing import Literal, Self

from pydantic import Field

from encoder_core.families.pre_norm import PreNormConfig


class ModernBertConfig(PreNormConfig):
    """See `PreNormConfig`.

    Attributes:
        local_attention: tokens that a local layer's window holds, half of them on each side of the query.
        global_every: layers 0, this, twice this, ... see the whole row; the others are local.
        global_rope_base, local_rope_base: of the rotary positions of global and of local layers.
    """

    family: Literal["modernbert"] = "modernbert"
    local_attention: int = Field(default=128, gt=0, multiple_of=2)
    global_every: int = Field(default=3, gt=0)
    global_rope_base: float = Field(default=160_000.0, gt=0)
    local_rope_base: float = Field(default=10_000.0, gt=0)

    @property
    def output_scale(self) -> float:
        """Megatron's (the paper, section 2.2.1)."""
        return math.sqrt(0.5 / self.layers)

    def window(self, layer: int) -> int | None:
        return self.local_attention // 2 if layer % self.global_every else None

    def rope_base(self, layer: int) -> float:
        return self.local_rope_base if layer % self.global_every else self.global_rope_base

    def with_rope_base(self, base: float) -> Self:
        return self.model_copy(update={"global_rope_base": base})


BASE = ModernBertConfig(layers=22, hidden=768, heads=12, feed_forward=1152, vocab=50_368)
LARGE = ModernBertConfig(layers=28, hidden=1024, heads=16, feed_forward=2624, vocab=50_368)
