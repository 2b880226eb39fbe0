"""Replaced-token detection, as a recipe describes it. The papers, and how it is computed: `objectives/replaced.py`."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from encoder_core.families.catalogue import DetectorConfig
from encoder_core.terms.term import ModuleConfig, Refusal, Setting, Weight

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
