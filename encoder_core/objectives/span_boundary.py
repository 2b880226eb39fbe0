"""SpanBERT (Joshi et al., 2020): masked spans are predicted from their own positions and from their boundaries."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from encoder_core.batch import Batch, sent
from encoder_core.cost.activations import Activations, kept_by_decoder
from encoder_core.cost.flops import decoder
from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import Saved, norm
from encoder_core.cost.states import CountedStates
from encoder_core.families.catalogue import ModelConfig
from encoder_core.heads.prediction import MAX_TARGETS, POSITION_WIDTH, SpanBoundaryHead
from encoder_core.layers.attention import Attend, automatic
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.multitask import MultitaskModel, multitask_model
from encoder_core.objectives.term import HeadConfig, HeadTerm, Refusal, Setting, States, TermSums


class SboConfig(HeadConfig):
    """Span boundary objective: predicts masked spans from the two tokens around them (section 3.2).

    Costs assume that every target has a boundary. In fact, targets of spans at the ends of a row have none, nor have
    targets of a span from its sixteenth on.
    """

    name = "sbo"
    reads = "all"

    def device(self, model: ModelConfig, word: nn.Embedding) -> "SpanBoundary":
        head = SpanBoundaryHead(
            model.hidden, word, activation=model.head_activation, eps=model.layer_norm_eps
        )
        return SpanBoundary(self, head)

    def products(self, states: CountedStates) -> Iterator[Product]:
        model, targets = states.model, states.shape.targets
        hidden, width = model.hidden, model.embedding_width
        yield Product("head: span boundary", targets, 2 * hidden + POSITION_WIDTH, hidden)
        yield Product("head: span boundary", targets, hidden, width)
        yield from decoder(width, model.vocabulary, targets)

    def keeps(self, states: CountedStates) -> Activations:
        model, targets = states.model, states.shape.targets
        hidden, width = model.hidden, model.embedding_width
        outside = (
            Saved("head: boundaries and places", targets * (2 * hidden + POSITION_WIDTH)),
            Saved("head: before activations, and between", targets * hidden, count=2),
            Saved("head: before activations, and between", targets * width),
            *norm(targets, hidden),
            *norm(targets, width),
            *kept_by_decoder(width, model.vocabulary, targets),
        )
        return Activations(outside, ())

    def scored(self, shape: Shape) -> int:
        return shape.targets

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse objectives without masked spans."""
        others = [name for name in setting.terms if name != self.name]
        if "mlm" not in others:
            beside = f", not {others[0]}" if others else ""
            yield Refusal(
                ("objective",),
                f"sbo needs mlm{beside}: it predicts the tokens that mlm masks",
                "add objective.mlm, or leave sbo out",
            )
        elif setting.rows is not None and setting.rows.unit != "span":
            yield Refusal(
                ("objective", "sbo"),
                f"the span boundary objective needs masked spans, but the unit of masks is {setting.rows.unit}",
                "set objective.mlm.unit to span, or leave sbo out",
            )


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
    the first `MAX_TARGETS` tokens are targets. They are found in the host's copy, so that nothing waits for the
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
    chosen = bounded[span] & (place < MAX_TARGETS)
    span = span[chosen]
    found = (first[span] - 1, last[span] + 1, place[chosen], host.target_ids.numpy()[chosen])
    return BoundaryTargets(*(sent(torch.from_numpy(each), device) for each in found))


class SpanBoundary(HeadTerm):
    """Cross-entropy of the ids of targets that have a boundary; metric "correct"."""

    def __init__(self, config: SboConfig, head: SpanBoundaryHead) -> None:
        super().__init__(config, {"boundary_head": head})
        self.head = head

    def targets(self, batch: Batch) -> int:
        return boundary_targets(batch).ids.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        wanted = boundary_targets(batch)
        left_BH, right_BH = (states.everywhere.index_select(0, side) for side in (wanted.left, wanted.right))
        found = self.head(left_BH, right_BH, wanted.place, wanted.ids)
        return TermSums(found.loss_sum, wanted.ids.numel(), {"correct": found.correct})


def span_boundary_model(
    config: ModelConfig,
    weight: float = 1.0,
    *,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> MultitaskModel:
    """Build a network of any family with masked tokens and this term; see `multitask_model`."""
    return multitask_model(
        config,
        [MlmConfig(), SboConfig(weight=weight)],
        checkpoint_activations=checkpoint_activations,
        attend=attend,
    )
