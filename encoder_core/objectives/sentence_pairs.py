"""Whether the two segments of a row belong together: next sentence prediction and sentence order prediction.

If there are a generator and a discriminator, the generator learns this loss; it reads the masked text.
"""

from encoder_core.batch import Batch
from encoder_core.heads.classification import PairHead
from encoder_core.objectives.term import HeadTerm, Shared, States, TermSums
from encoder_core.terms.sentence_pairs import PairConfig


class SentencePair(HeadTerm, of=PairConfig):
    """Cross-entropy of the rows' labels, from the states of their first tokens; metric "correct".

    Rows without labels (`pair_labels` None), and those that are not classified (`pair_rows`), have no targets, but the
    head still takes part in the graph.
    """

    def __init__(self, config: PairConfig, shared: Shared) -> None:
        self.head = PairHead(shared.model.hidden)
        super().__init__(config, {"pair_head": self.head})

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
