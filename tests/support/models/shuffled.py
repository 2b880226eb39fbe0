"""The description of a made-up objective, as a newcomer writes it: which token stood at a place before tokens moved.

`tests/architecture/test_habit_of_an_objective.py` copies it to encoder_core/terms/.
"""

from collections.abc import Iterator

from encoder_core.families.xlnet import XlnetConfig
from encoder_core.terms.term import HeadConfig, Refusal, Setting


class ShuffledConfig(HeadConfig):
    """Tokens that changed places, from the states where they stood."""

    name = "shuffled"
    exported = "mlm"
    reads = "targets"

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Not XLNet; not beside mlm, which chooses targets too; not where texts are compared."""
        if isinstance(setting.model, XlnetConfig):
            yield Refusal(("objective",), "xlnet reads rows in a drawn order", "choose another family")
        elif "mlm" in setting.terms:
            yield Refusal(("objective",), "shuffled and mlm each choose the targets", "keep one of them")
        elif setting.rows is not None and (setting.rows.texts or setting.rows.lanes):
            yield Refusal(
                ("input", "packing"), "shuffled needs running text", "set input.packing to full_sentences"
            )
