"""SpanBERT's span boundary objective (Joshi et al., 2020): predicts masked spans from the tokens next to them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import MAX_SPAN_TARGETS, SPAN_POSITION_WIDTH, linear_weight_count, norm_weight_count
from encoder_core.objectives.term import HeadConfig, HeadTerm, Refusal, SharedParts, TermSetting, TermSums, require_mlm

if TYPE_CHECKING:  # torch is imported only where tensors are computed, not to read a recipe
    from jaxtyping import Int
    from torch import Tensor

    from encoder_core.batch import Batch
    from encoder_core.objectives.modules.states import States


class SboConfig(HeadConfig):
    """Span boundary objective: predicts the tokens of a masked span from the two tokens around it (section 3.2)."""

    name = "sbo"
    reads = "all"

    def weight_count(self, model: ModelConfig) -> int:
        hidden, width = model.hidden, model.embedding_width
        first = linear_weight_count(2 * hidden + SPAN_POSITION_WIDTH, hidden) + norm_weight_count(hidden)
        second = linear_weight_count(hidden, width) + norm_weight_count(width) + model.vocabulary_size
        return MAX_SPAN_TARGETS * SPAN_POSITION_WIDTH + first + second

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse objectives without mlm, and masks that are not spans."""
        yield from require_mlm(self.name, setting, "it predicts the tokens that mlm masks")
        if "mlm" in setting.terms and setting.rows is not None and setting.rows.unit != "span":
            yield Refusal(
                ("objective", "sbo"),
                f"the span boundary objective needs masked spans, but the unit of masks is {setting.rows.unit}",
                "set objective.mlm.unit to span, or remove objective.sbo",
            )

    def build(self, shared: SharedParts) -> "SpanBoundary":
        return SpanBoundary(self, shared)


class SpanBoundary(HeadTerm):
    """Cross-entropy of the ids of targets that have a boundary; metric "correct"."""

    def __init__(self, config: SboConfig, shared: SharedParts) -> None:
        from encoder_core.heads.prediction import SpanBoundaryHead

        model = shared.model
        activation, eps = model.head_activation, model.layer_norm_eps
        self.head = SpanBoundaryHead(model.hidden, shared.word, activation=activation, eps=eps)
        super().__init__(config, {"boundary_head": self.head})

    def target_count(self, batch: "Batch") -> int:
        return boundary_targets(batch).ids.numel()

    def sums(self, states: "States", batch: "Batch") -> TermSums:
        wanted = boundary_targets(batch)
        left_BH, right_BH = (states.all_states.index_select(0, side) for side in (wanted.left, wanted.right))
        found = self.head(left_BH, right_BH, wanted.place, wanted.ids)
        return TermSums(found.loss_sum, wanted.ids.numel(), {"correct": found.correct})


@dataclass(frozen=True)
class BoundaryTargets:
    """The B targets that are also predicted from their span's boundary.

    Attributes:
        left, right: flat positions of the tokens directly before and after the span.
        place: position of the target in its span, from 0.
        ids: ids to predict.
    """

    left: 'Int[Tensor, " targets"]'
    right: 'Int[Tensor, " targets"]'
    place: 'Int[Tensor, " targets"]'
    ids: 'Int[Tensor, " targets"]'


def boundary_targets(batch: "Batch") -> BoundaryTargets:
    """Return the targets whose span has a boundary. A span is a run of consecutive targets in a row; adjacent spans
    count as one.

    A span next to a row's first or last token (special tokens) has no boundary, so its tokens are left out. So are the
    tokens of a span after the first `MAX_SPAN_TARGETS`. All is computed on the host's copy of the batch, so nothing
    waits for the device.
    """
    import torch

    from encoder_core.batch import copy_to_device

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
    return BoundaryTargets(*(copy_to_device(torch.from_numpy(each), device) for each in found))
