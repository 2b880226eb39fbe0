"""Denoising (Lewis et al. 2019, arXiv 1910.13461, BART), as a recipe describes it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from encoder_core.cost.activations import (
    Activations,
    kept_by_decoding,
    kept_by_embeddings,
    kept_by_head,
    kept_by_layers,
)
from encoder_core.cost.flops import encoder, head, writing
from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import Kernel
from encoder_core.families.bart import BartConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.terms.term import HeadConfig, ModuleConfig, Refusal, Setting


class DenoiseConfig(ModuleConfig):
    """An encoder reads corrupted rows, and a decoder writes the rows. How rows are corrupted is a setting of the data
    service.
    """

    name = "denoise"
    exported = "denoise"

    def read(self, length: int) -> int:
        """Return how many tokens the encoder reads of a row of `length` tokens, on average."""
        return length

    def products(self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape) -> Iterator[Product]:
        assert isinstance(model, BartConfig)  # else it is refused
        reads = self._reads(shape)
        yield from encoder(model, reads)
        yield from writing(model, shape, reads.length)
        yield from head(model, shape.targets)

    def keeps(
        self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape, kernel: Kernel
    ) -> list[Activations]:
        assert isinstance(model, BartConfig)  # else it is refused
        reads = self._reads(shape)
        embeddings = kept_by_embeddings(model, reads, kernel)
        reading = Activations(tuple(embeddings), tuple(kept_by_layers(model, reads, kernel)))
        scores = Activations(tuple(kept_by_head(model, shape.targets)), ())
        return [reading + kept_by_decoding(model, shape, reads.length, kernel) + scores]

    def scored(self, shape: Shape) -> int:
        return shape.targets

    def _reads(self, shape: Shape) -> Shape:
        """Return the shape of the rows that the encoder reads: it sees them whole."""
        return replace(shape, length=self.read(shape.length), causal=False)

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse other terms, families without a decoder, and rows that are not of one segment."""
        others = [name for name in setting.terms if name != self.name]
        rows = setting.rows
        if others:
            yield Refusal(
                ("objective",),
                f"denoise cannot be combined with {others[0]}: its encoder reads corrupted rows, and all tokens are "
                "predicted by its decoder",
                "leave one of the two out",
            )
        elif not setting.model.decodes:
            yield Refusal(
                ("objective",),
                f"a model of family {setting.model.family} is not trained by denoise: it has no decoder",
                "use denoise for bart, and mlm for another family",
            )
        elif rows is not None and not rows.packed:
            yield Refusal(
                ("input", "packing"),
                f"{rows.packing} rows are not rows of one segment, which denoise corrupts",
                "set input.packing to full_sentences",
            )
