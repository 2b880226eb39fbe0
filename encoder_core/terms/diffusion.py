"""Masked diffusion (Sahoo et al. 2024, arXiv 2406.07524; Nie et al. 2025, arXiv 2502.09992), as a recipe describes
it.
"""

from collections.abc import Iterator

from encoder_core.terms.mlm import TokenPrediction
from encoder_core.terms.term import Refusal, Setting


class DiffusionConfig(TokenPrediction):
    """Masked diffusion. Rates and masks are drawn by the data service. An export is the family's masked language model,
    whose head it trains.
    """

    name = "diffusion"

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse other terms, which need masks of a fixed rate, and what mlm refuses."""
        found = list(super().refusals(setting))
        others = [name for name in setting.terms if name != self.name]
        if others and not found:
            found.append(
                Refusal(
                    ("objective",),
                    f"diffusion cannot be combined with {others[0]}: it hides anything between none and all of a row",
                    "leave one of the two out",
                )
            )
        yield from found
