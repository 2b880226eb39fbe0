"""Whether the two segments of a row belong together: next sentence prediction and sentence order prediction.

If there are a generator and a discriminator, the generator learns this loss; it reads the masked text.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal

from torch import nn

from encoder_core.batch import Batch
from encoder_core.cost.activations import Activations
from encoder_core.cost.products import Product
from encoder_core.cost.saved import Saved
from encoder_core.cost.states import CountedStates
from encoder_core.families.catalogue import ModelConfig
from encoder_core.heads.classification import PairHead
from encoder_core.layers.attention import Attend, automatic
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.multitask import MultitaskModel, multitask_model
from encoder_core.objectives.term import HeadConfig, HeadTerm, Refusal, Setting, States, TermSums

PairTask = Literal["nsp", "sop"]


class _PairConfig(HeadConfig):
    exported = "mlm_pair"
    reads = "first"

    def device(self, model: ModelConfig, word: nn.Embedding) -> "SentencePair":
        return SentencePair(self, PairHead(model.hidden))

    def products(self, states: CountedStates) -> Iterator[Product]:
        """Yield the products of the pooler and the classifier."""
        hidden = states.model.hidden
        yield from states.at(1)
        yield Product("head: pairs", states.shape.rows, hidden, hidden)
        yield Product("head: pairs", states.shape.rows, hidden, 2)

    def keeps(self, states: CountedStates) -> Activations:
        pairs = Saved("head: pairs", states.shape.rows * states.model.hidden, count=2)
        return Activations((pairs,), ()) + states.at_keeps(1)

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse objectives without mlm, and rows without the label of this term."""
        others = [name for name in setting.terms if name != self.name]
        if "mlm" not in others:
            beside = f", not {others[0]}" if others else ""
            yield Refusal(
                ("objective",),
                f"{self.name} needs mlm{beside}: one label a row does not suffice to learn words",
                f"add objective.mlm, or leave {self.name} out",
            )
        yield from self._of_rows(setting)

    @abstractmethod
    def _of_rows(self, setting: Setting) -> Iterator[Refusal]: ...


class NspConfig(_PairConfig):
    """Next sentence prediction: whether the second segment follows the first (BERT, section 3.1)."""

    name = "nsp"

    def _of_rows(self, setting: Setting) -> Iterator[Refusal]:
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


class SopConfig(_PairConfig):
    """Sentence order prediction: whether two segments are in order (ALBERT, section 3.1)."""

    name = "sop"

    def _of_rows(self, setting: Setting) -> Iterator[Refusal]:
        if setting.rows is not None and setting.rows.label != "order" and "nsp" not in setting.terms:
            yield Refusal(
                ("objective", "sop"),
                f"sentence order prediction needs swapped segments, but {setting.rows.packing} rows have none",
                "set input.packing to ordered_pair, or leave sop out",
            )


class SentencePair(HeadTerm):
    """Cross-entropy of the rows' labels, from the states of their first tokens; metric "correct".

    Rows without labels (`pair_labels` None), and those that are not classified (`pair_rows`), have no targets, but the
    head still takes part in the graph.
    """

    def __init__(self, config: _PairConfig, head: PairHead) -> None:
        super().__init__(config, {"pair_head": head})
        self.head = head

    def targets(self, batch: Batch) -> int:
        if batch.pair_labels is None:
            return 0
        return batch.pair_labels.numel() if batch.pair_rows is None else batch.pair_rows.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        labels_R = batch.cu_seqlens[:0].long() if batch.pair_labels is None else batch.pair_labels
        first_R = batch.cu_seqlens[: len(labels_R)].long()
        if batch.pair_labels is not None and batch.pair_rows is not None:
            labels_R, first_R = labels_R[batch.pair_rows], first_R[batch.pair_rows]
        found = self.head(states.at(first_R, most=1), labels_R)
        return TermSums(found.loss_sum, self.targets(batch), {"correct": found.correct})


def masked_language_model_with_pairs(
    config: ModelConfig,
    task: PairTask,
    weight: float = 1.0,
    *,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> MultitaskModel:
    """Build a network of any family with masked tokens and this term; see `multitask_model`."""
    pairs = NspConfig(weight=weight) if task == "nsp" else SopConfig(weight=weight)
    return multitask_model(
        config, [MlmConfig(), pairs], checkpoint_activations=checkpoint_activations, attend=attend
    )
