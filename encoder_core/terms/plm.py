"""Permuted language modelling (Yang et al. 2019, section 2.2), as a recipe describes it."""

from collections.abc import Iterator, Sequence

from encoder_core.cost.activations import Activations, kept_by_decoder, kept_by_two_streams
from encoder_core.cost.flops import decoder, two_streams
from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import Kernel
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.terms.term import HeadConfig, LateWeight, ModuleConfig, Refusal, Setting


class PlmConfig(LateWeight, ModuleConfig):
    """Permuted language modelling. The prediction order is a setting of the data service."""

    name = "plm"
    exported = "plm"

    def products(self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape) -> Iterator[Product]:
        assert isinstance(model, XlnetConfig)  # else it is refused
        yield from two_streams(model, shape)
        yield from decoder(model.hidden, model.vocabulary, shape.targets)

    def keeps(
        self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape, kernel: Kernel
    ) -> list[Activations]:
        assert isinstance(model, XlnetConfig)  # else it is refused
        scores = kept_by_decoder(model.hidden, model.vocabulary, shape.targets)
        return [kept_by_two_streams(model, shape, kernel) + Activations(tuple(scores), ())]

    def scored(self, shape: Shape) -> int:
        return shape.targets

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse all but XLNet, on rows in lanes, with no other term."""
        others = [name for name in setting.terms if name != self.name]
        if others:
            yield Refusal(
                ("objective",),
                f"plm cannot be combined with {others[0]}: XLNet's two streams read rows in a random order with "
                "memory, without masks",
                "choose exactly one of mlm, plm and contrastive",
            )
        elif not isinstance(setting.model, XlnetConfig):
            yield Refusal(
                ("objective",),
                f"a model of family {setting.model.family} is not trained by plm: it has no query stream",
                "use plm for xlnet, and mlm for every other family",
            )
        elif setting.rows is not None and not setting.rows.lanes:
            yield Refusal(
                ("objective", "plm"),
                "permuted language modelling needs rows that continue from step to step, but "
                f"{setting.rows.packing} rows do not",
                "set input.packing to lanes",
            )
