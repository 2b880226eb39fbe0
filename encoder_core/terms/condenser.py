"""Condenser (Gao and Callan 2021, arXiv 2104.08253), as a recipe describes it. How it is computed:
`objectives/condenser.py`.
"""

from collections.abc import Iterator

from pydantic import Field, PositiveInt

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import layer_weights
from encoder_core.terms.term import BottleneckConfig, Refusal, Setting, SmallObjective


class CondenserConfig(BottleneckConfig):
    """Hidden tokens, predicted by a few layers from early states of all tokens and the last state of the first one.

    Attributes:
        early: number of the layer whose states the head reads; 0 the embeddings. None: half of the model's layers, as
            in the paper (6 of 12).
        layers: number of layers of the head (paper: 2).
    """

    name = "condenser"
    reads = "layers"

    early: int | None = Field(default=None, ge=0)
    layers: PositiveInt = 2

    def early_layer(self, layers: int) -> int:
        """Return `early` of a model with so many layers."""
        return layers // 2 if self.early is None else self.early

    def weights(self, model: ModelConfig) -> int:
        return self.layers * layer_weights(model.hidden, model.feed_forward)

    def shrink(self, form: SmallObjective) -> "CondenserConfig":
        """Return the term for a model of fewer layers: it reads the middle one."""
        return self.model_copy(update={"early": None})

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse also an early layer that is none of the model's, or its last."""
        yield from super().refusals(setting)
        layers = setting.model.layers
        if self.early is not None and self.early >= layers:
            yield Refusal(
                ("objective", self.name, "early"),
                f"the head reads the states of layer {self.early}, but the model has {layers} layers, and the last "
                "one's states would show it what the vector is to hold",
                f"give 0 (the embeddings) to {layers - 1}, or null for {layers // 2}",
            )
