"""Denoising (Lewis et al. 2019, arXiv 1910.13461, BART), as a recipe describes it."""

from collections.abc import Iterator

from encoder_core.terms.term import ModuleConfig, Refusal, Setting


class DenoiseConfig(ModuleConfig):
    """An encoder reads corrupted rows, and a decoder writes the rows. How rows are corrupted is a setting of the data
    service.
    """

    name = "denoise"
    exported = "denoise"

    def read(self, length: int) -> int:
        """Return how many tokens the encoder reads of a row of `length` tokens, on average."""
        return length

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
        elif not setting.model.has_decoder:
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
