"""Replaced-token detection, as a recipe describes it. The papers, and how it is computed: `objectives/replaced.py`."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from encoder_core.cost.activations import Activations, kept_by_embeddings, kept_by_layers
from encoder_core.cost.flops import encoder
from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import FP32, Kernel, Saved, norm
from encoder_core.families.catalogue import DetectorConfig, ModelConfig
from encoder_core.families.deberta import Deberta
from encoder_core.terms.composition import multitask_keeps, multitask_products
from encoder_core.terms.term import HeadConfig, ModuleConfig, Refusal, Setting, Weight

Sharing = Literal["shared", "gradient_disentangled"]


class ReplacedTokenConfig(ModuleConfig):
    """How the discriminator, a second network, is trained beside the generator, which learns all other terms.

    Attributes:
        weight: factor of the discriminator's loss (ELECTRA's lambda).
        temperature: temperature of the softmax from which the generator's tokens are drawn.
        embeddings: shared (ELECTRA): one set, and one update of both networks. gradient_disentangled (DeBERTa v3):
            the discriminator's embeddings are the generator's plus a difference, and the discriminator's loss trains
            only the difference; the generator is updated first, then the discriminator, each with its own clipping.
    """

    name = "rtd"

    weight: Weight = 50.0
    temperature: float = Field(default=1.0, gt=0)
    embeddings: Sharing = "shared"

    def products(self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape) -> Iterator[Product]:
        assert isinstance(model, DetectorConfig)  # else it is refused
        yield from multitask_products(model.generator, heads, shape)
        yield from encoder(model, shape)
        yield Product("head: replaced or not", shape.tokens, model.hidden, model.hidden)
        yield Product("head: replaced or not", shape.tokens, model.hidden, 1)

    def keeps(
        self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape, kernel: Kernel
    ) -> list[Activations]:
        assert isinstance(model, DetectorConfig)  # else it is refused
        generator = multitask_keeps(model.generator, heads, shape, kernel)
        discriminator = discriminator_keeps(model, shape, kernel)
        if self.embeddings == "gradient_disentangled":
            return [generator, discriminator]
        return [generator + discriminator]

    def scored(self, shape: Shape) -> int:
        return shape.targets

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse objectives and families without a generator that learns masked tokens."""
        others = [name for name in setting.terms if name != "rtd"]
        if "mlm" not in others:
            beside = f", not {others[0]}" if others else ""
            yield Refusal(
                ("objective",),
                f"rtd needs mlm{beside}: the generator, which learns masked tokens, makes the replacements to detect",
                "add objective.mlm, or leave rtd out",
            )
        if not isinstance(setting.model, DetectorConfig):
            yield Refusal(
                ("objective",),
                f"a model of family {setting.model.family} has no generator for rtd, a smaller network of its kind "
                "that fills masks",
                "choose another family, or leave rtd out",
            )


def discriminator_keeps(model: DetectorConfig, shape: Shape, kernel: Kernel) -> Activations:
    """Return what the discriminator's forward pass saves for the backward pass."""
    states = shape.tokens * model.hidden
    outside = [
        Saved("head: states, before and after the activation", states, count=3),
        Saved("scores and labels", shape.tokens, FP32, 2),
    ]
    if isinstance(model, Deberta):
        outside += norm(shape.tokens, model.hidden)
    return Activations(
        (*kept_by_embeddings(model, shape), *outside), tuple(kept_by_layers(model, shape, kernel))
    )
