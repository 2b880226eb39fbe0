"""Next sentence prediction and sentence order prediction: classify the two segments of a row.

With ELECTRA, the generator gets this loss.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import linear_weight_count
from encoder_core.objectives.term import HeadConfig, HeadTerm, Refusal, SharedParts, TermSetting, TermSums, require_mlm

if TYPE_CHECKING:  # torch is imported only where tensors are computed, not to read a recipe
    from encoder_core.batch import Batch
    from encoder_core.objectives.modules.states import States


class PairConfig(HeadConfig):
    """Base of the terms that classify a row's pair of segments."""

    exported = "mlm_pair"
    reads = "first"

    def weight_count(self, model: ModelConfig) -> int:
        return linear_weight_count(model.hidden, model.hidden) + linear_weight_count(model.hidden, 2)

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse objectives without mlm, and rows without this term's kind of label."""
        yield from require_mlm(self.name, setting, "one label a row does not suffice to learn words")
        yield from self._row_refusals(setting)

    @abstractmethod
    def _row_refusals(self, setting: TermSetting) -> Iterator[Refusal]: ...

    def build(self, shared: SharedParts) -> "SentencePair":
        return SentencePair(self, shared)


class NspConfig(PairConfig):
    """Next sentence prediction: whether the second segment follows the first (BERT, section 3.1)."""

    name = "nsp"

    def _row_refusals(self, setting: TermSetting) -> Iterator[Refusal]:
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
                "set input.packing to segment_pair or sentence_pair, or remove objective.nsp",
            )


class SopConfig(PairConfig):
    """Sentence order prediction: whether the two segments are in order or swapped (ALBERT, section 3.1)."""

    name = "sop"

    def _row_refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        if setting.rows is not None and setting.rows.label != "order" and "nsp" not in setting.terms:
            yield Refusal(
                ("objective", "sop"),
                f"sentence order prediction needs swapped segments, but {setting.rows.packing} rows have none",
                "set input.packing to ordered_pair, or remove objective.sop",
            )


class SentencePair(HeadTerm):
    """Cross-entropy of the rows' labels, from the states of their first tokens; metric "correct".

    Rows that have no label (`pair_labels` None) or are left out (`pair_rows`) are not targets. Without targets the head
    runs on 0 rows, so that it takes part in the backward pass.
    """

    def __init__(self, config: PairConfig, shared: SharedParts) -> None:
        from encoder_core.heads.classification import PairHead

        self.head = PairHead(shared.model.hidden)
        super().__init__(config, {"pair_head": self.head})

    def target_count(self, batch: "Batch") -> int:
        if batch.pair_labels is None:
            return 0
        return batch.pair_labels.numel() if batch.pair_rows is None else batch.pair_rows.numel()

    def sums(self, states: "States", batch: "Batch") -> TermSums:
        labels_R = batch.cu_seqlens[:0].long() if batch.pair_labels is None else batch.pair_labels
        first_R = batch.cu_seqlens[: len(labels_R)].long()
        if batch.pair_labels is not None and batch.pair_rows is not None:
            labels_R, first_R = labels_R[batch.pair_rows], first_R[batch.pair_rows]
        found = self.head(states.states_at(first_R, max_per_row=1), labels_R)
        return TermSums(found.loss_sum, self.target_count(batch), {"correct": found.correct})
