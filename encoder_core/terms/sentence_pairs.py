"""Next sentence prediction and sentence order prediction, as a recipe describes them."""

from abc import abstractmethod
from collections.abc import Iterator

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import linear_weights
from encoder_core.terms.term import HeadConfig, Refusal, Setting, require_mlm


class PairConfig(HeadConfig):
    exported = "mlm_pair"
    reads = "first"

    def weights(self, model: ModelConfig) -> int:
        return linear_weights(model.hidden, model.hidden) + linear_weights(model.hidden, 2)

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse objectives without mlm, and rows without the label of this term."""
        yield from require_mlm(self.name, setting, "one label a row does not suffice to learn words")
        yield from self._row_refusals(setting)

    @abstractmethod
    def _row_refusals(self, setting: Setting) -> Iterator[Refusal]: ...


class NspConfig(PairConfig):
    """Next sentence prediction: whether the second segment follows the first (BERT, section 3.1)."""

    name = "nsp"

    def _row_refusals(self, setting: Setting) -> Iterator[Refusal]:
        if "sop" in setting.terms:
            yield Refusal(
                ("objective", "sop"),
                "nsp and sop need the same label of a row: either its second segment is from "
                "elsewhere, or it is swapped",
                "keep one of the two",
            )
        elif setting.rows is not None and setting.rows.label != "next":
            yield Refusal(
                ("objective", "nsp"),
                f"next sentence prediction needs rows with two segments and a label, but {setting.rows.packing} rows "
                "have none",
                "set input.packing to segment_pair or sentence_pair, or leave nsp out",
            )


class SopConfig(PairConfig):
    """Sentence order prediction: whether two segments are in order (ALBERT, section 3.1)."""

    name = "sop"

    def _row_refusals(self, setting: Setting) -> Iterator[Refusal]:
        if setting.rows is not None and setting.rows.label != "order" and "nsp" not in setting.terms:
            yield Refusal(
                ("objective", "sop"),
                f"sentence order prediction needs swapped segments, but {setting.rows.packing} rows have none",
                "set input.packing to ordered_pair, or leave sop out",
            )
