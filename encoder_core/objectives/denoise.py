"""Settings of denoising (BART: Lewis et al. 2019, arXiv 1910.13461); `modules/denoising.py` computes it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from encoder_core.families.catalogue import ModelConfig
from encoder_core.objectives.term import HeadConfig, ModuleConfig, Refusal, TermSetting, family_refusal, last_weight

if TYPE_CHECKING:  # torch is imported only where modules are built, not to read a recipe
    from encoder_core.objectives.modules.denoising import DenoisingModel


class DenoiseConfig(ModuleConfig):
    """Denoising: an encoder reads corrupted rows, and a decoder predicts the original rows. The settings of the
    corruption belong to the data service.
    """

    name = "denoise"
    exported = "denoise"

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse other terms, families without a decoder, and rows with several segments."""
        others = [name for name in setting.terms if name != self.name]
        rows = setting.rows
        if others:
            yield Refusal(
                ("objective",),
                f"denoise cannot be combined with {others[0]}: its encoder reads corrupted rows, and all tokens are "
                "predicted by its decoder",
                "leave one of the two out",
            )
        elif not setting.model.has_decoder:
            remedy = "use denoise for bart, and mlm for another family"
            yield family_refusal("denoise", setting, "it has no decoder", remedy)
        elif rows is not None and not rows.packed:
            yield Refusal(
                ("input", "packing"),
                f"denoise needs rows of running text in a single segment, but {rows.packing} rows are of another kind",
                "set input.packing to full_sentences",
            )

    def build(self, model: ModelConfig, heads: Sequence[HeadConfig] = ()) -> "DenoisingModel":
        """Build encoder, decoder and head.

        Raises:
            ModelError: the family has no decoder, or the size of the vocabulary is unknown.
        """
        from encoder_core.layers.encoder import Encoder
        from encoder_core.objectives.modules.denoising import DenoisingModel
        from encoder_core.objectives.modules.multitask import tied_head

        encoder = model.encoder()
        word = encoder.embeddings.word
        decoder = model.decoder(word)
        assert isinstance(encoder, Encoder)  # all families with a decoder have this class of encoder
        return DenoisingModel(encoder, decoder, tied_head(model, word), last_weight(self.weight))
