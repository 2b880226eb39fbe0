"""SpanBERT (Joshi et al., 2020): masked spans are predicted from their own positions and from their boundaries."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from encoder_core.batch import Batch, send
from encoder_core.heads.prediction import SpanBoundaryHead
from encoder_core.layers.sizes import MAX_SPAN_TARGETS
from encoder_core.objectives.term import HeadTerm, Shared, States, TermSums
from encoder_core.terms.span_boundary import SboConfig


@dataclass(frozen=True)
class BoundaryTargets:
    """The B targets that are also predicted from their span's boundary.

    Attributes:
        left, right: flat positions of the tokens just outside the span.
        place: index of the target in its span, from 0.
        ids: ids to predict.
    """

    left: Int[Tensor, " targets"]
    right: Int[Tensor, " targets"]
    place: Int[Tensor, " targets"]
    ids: Int[Tensor, " targets"]


def boundary_targets(batch: Batch) -> BoundaryTargets:
    """Return the targets with a boundary. Spans are runs of consecutive targets inside rows; adjacent spans count as
    one.

    A span next to a row's first or last token (the special ones) has no boundary and no target. Of a longer span only
    the first `MAX_SPAN_TARGETS` tokens are targets. They are found in the host's copy, so that nothing waits for the
    device.
    """
    host, device = batch.on_host, batch.tokens.device
    at, positions, ends = host.target_positions.numpy(), host.positions.numpy(), host.cu_seqlens.numpy()[1:]
    begins = (np.diff(at, prepend=at[:1] - 2) != 1) | (positions[at] == 0)
    span = begins.cumsum() - 1
    first, last = at[begins], at[np.roll(begins, -1)]
    row_end = ends[np.searchsorted(ends, first, side="right")]
    bounded = (positions[first] > 1) & (last + 1 < row_end - 1)
    place = at - first[span]
    chosen = bounded[span] & (place < MAX_SPAN_TARGETS)
    span = span[chosen]
    found = (first[span] - 1, last[span] + 1, place[chosen], host.target_ids.numpy()[chosen])
    return BoundaryTargets(*(send(torch.from_numpy(each), device) for each in found))


class SpanBoundary(HeadTerm, of=SboConfig):
    """Cross-entropy of the ids of targets that have a boundary; metric "correct"."""

    def __init__(self, config: SboConfig, shared: Shared) -> None:
        model = shared.model
        activation, eps = model.head_activation, model.layer_norm_eps
        self.head = SpanBoundaryHead(model.hidden, shared.word, activation=activation, eps=eps)
        super().__init__(config, {"boundary_head": self.head})

    def targets(self, batch: Batch) -> int:
        return boundary_targets(batch).ids.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        wanted = boundary_targets(batch)
        left_BH, right_BH = (states.all_states.index_select(0, side) for side in (wanted.left, wanted.right))
        found = self.head(left_BH, right_BH, wanted.place, wanted.ids)
        return TermSums(found.loss_sum, wanted.ids.numel(), {"correct": found.correct})
