"""SpanBERT (Joshi et al., 2020): masked spans predicted from their own positions and from their boundaries."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.families.build import AnyEncoder, ModelConfig, build_encoder
from encoder_core.heads.prediction import MAX_TARGETS, MaskedLanguageModelHead, SpanBoundaryHead
from encoder_core.layers.attention import Attend, automatic
from encoder_core.objectives.losses import LossSums, ObjectiveModule, Term
from encoder_core.objectives.mlm import tied_head


@dataclass(frozen=True)
class BoundaryTargets:
    """The B targets that are also predicted from their span's boundary.

    Attributes:
        left, right: flat positions of the tokens just outside the span.
        place: from 0, the target's place in its span.
        ids: what to predict.
    """

    left: Int[Tensor, " targets"]
    right: Int[Tensor, " targets"]
    place: Int[Tensor, " targets"]
    ids: Int[Tensor, " targets"]


def boundary_targets(batch: Batch) -> BoundaryTargets:
    """Spans are the runs of consecutive targets inside rows, since adjacent spans count as one.

    A span next to a row's first or last token (the special ones) has no boundary and no target; of a longer span
    only the first `MAX_TARGETS` tokens are targets. Waits for the device if the batch lives on one.
    """
    at = batch.target_positions
    inside = at.diff(prepend=at[:1] - 2) == 1
    begins = ~inside | (batch.positions[at] == 0)
    span = begins.cumsum(0) - 1
    first = at[begins]
    last = at[begins.roll(-1)] if len(at) else at
    row = torch.searchsorted(batch.cu_seqlens[1:], first.int(), right=True)
    row_end = batch.cu_seqlens[1:][row]
    bounded = (batch.positions[first] > 1) & (last + 1 < row_end - 1)
    place = at - first[span]
    chosen = bounded[span] & (place < MAX_TARGETS)
    span = span[chosen]
    return BoundaryTargets(first[span] - 1, last[span] + 1, place[chosen], batch.target_ids[chosen])


class SpanBoundaryModel(ObjectiveModule):
    """Two terms: "mlm" over targets, and "sbo" over those with a boundary, times `weight`."""

    def __init__(
        self,
        encoder: AnyEncoder,
        head: MaskedLanguageModelHead,
        boundary_head: SpanBoundaryHead,
        weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.boundary_head = boundary_head
        self.weight = weight

    def target_counts(self, batch: Batch) -> dict[str, int]:
        """How many summands each term will have for this batch, known before the forward pass."""
        return {"mlm": batch.target_ids.numel(), "sbo": boundary_targets(batch).ids.numel()}

    def forward(self, batch: Batch) -> LossSums:
        """Sums for this batch; metrics: "mlm_correct" and "sbo_correct"."""
        hidden_TH = self.encoder(batch)
        loss_sum, correct, _ = self.head(hidden_TH, batch.target_positions, batch.target_ids)
        targets = boundary_targets(batch)
        left_BH, right_BH = (hidden_TH.index_select(0, side) for side in (targets.left, targets.right))
        sbo_sum, sbo_correct, _ = self.boundary_head(left_BH, right_BH, targets.place, targets.ids)
        terms = (
            Term("mlm", loss_sum, batch.target_ids.numel()),
            Term("sbo", sbo_sum, targets.ids.numel(), self.weight),
        )
        return LossSums(terms, {"mlm_correct": correct, "sbo_correct": sbo_correct})

    def logits(self, batch: Batch) -> Float[Tensor, "targets vocab"]:
        """Scores of all ids at the target positions, by the masked-language-model head."""
        return self.head.logits(self.encoder(batch).index_select(0, batch.target_positions))


def span_boundary_model(
    config: ModelConfig,
    weight: float = 1.0,
    *,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> SpanBoundaryModel:
    """Encoder and both heads, on the default device; weights not yet initialised (`initialise`).

    Raises ModelError if the configuration's vocabulary is unknown.
    """
    encoder = build_encoder(config, checkpoint_activations=checkpoint_activations, attend=attend)
    word = encoder.embeddings.word
    boundary_head = SpanBoundaryHead(
        config.hidden, word, activation=config.head_activation, eps=config.layer_norm_eps
    )
    return SpanBoundaryModel(encoder, tied_head(config, word), boundary_head, weight)
