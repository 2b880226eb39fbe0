"""Permuted language modelling (Yang et al. 2019, section 2.2): encoder and head as the module that the engine wraps."""

from collections.abc import Iterator, Sequence

from jaxtyping import Float
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.cost.activations import Activations, kept_by_decoder, kept_by_two_streams
from encoder_core.cost.flops import decoder, two_streams
from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import Kernel
from encoder_core.errors import TrainingError
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.heads.prediction import PermutationHead
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.xlnet_encoder import Memory, Streams, TwoStreamEncoder
from encoder_core.objectives.losses import LossSums, ObjectiveModule, Term, last_weight
from encoder_core.objectives.term import HeadConfig, LateWeight, ModuleConfig, Refusal, Setting


class PlmConfig(LateWeight, ModuleConfig):
    """Permuted language modelling. The prediction order is a setting of the data service."""

    name = "plm"
    exported = "plm"

    def module(
        self,
        model: ModelConfig,
        heads: Sequence[HeadConfig],
        *,
        checkpoint_activations: bool = False,
        attend: Attend = automatic,
    ) -> ObjectiveModule:
        assert isinstance(model, XlnetConfig)  # else it is refused
        assert not heads
        return permuted_language_model(
            model, last_weight(self.weight), checkpoint_activations=checkpoint_activations
        )

    def products(self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape) -> Iterator[Product]:
        assert isinstance(model, XlnetConfig)  # else it is refused
        yield from two_streams(model, shape)
        yield from decoder(model.hidden, model.vocabulary, shape.targets)

    def keeps(
        self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape, kernel: Kernel
    ) -> list[Activations]:
        assert isinstance(model, XlnetConfig)  # else it is refused
        scores = kept_by_decoder(model.hidden, model.vocabulary, shape.targets)
        return [kept_by_two_streams(model, shape, kernel) + Activations(tuple(scores), ())]

    def scored(self, shape: Shape) -> int:
        return shape.targets

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse all but XLNet, on rows in lanes, with no other term."""
        others = [name for name in setting.terms if name != self.name]
        if others:
            yield Refusal(
                ("objective",),
                f"plm cannot be combined with {others[0]}: XLNet's two streams read rows in a random order with "
                "memory, without masks",
                "choose exactly one of mlm, plm and contrastive",
            )
        elif not isinstance(setting.model, XlnetConfig):
            yield Refusal(
                ("objective",),
                f"a model of family {setting.model.family} is not trained by plm: it has no query stream",
                "use plm for xlnet, and mlm for every other family",
            )
        elif setting.rows is not None and not setting.rows.lanes:
            yield Refusal(
                ("objective", "plm"),
                "permuted language modelling needs rows that continue from step to step, but "
                f"{setting.rows.packing} rows do not",
                "set input.packing to lanes",
            )


class PermutedLanguageModel(ObjectiveModule):
    """Cross-entropy of the ids at the target positions, each predicted from the tokens before it in the factorisation
    order.

    Terms: "plm".
    """

    def __init__(self, encoder: TwoStreamEncoder, head: PermutationHead, weight: float = 1.0) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.weight = weight

    def target_counts(self, batch: Batch) -> dict[str, int]:
        """Return how many summands each term has for this batch; known before the forward pass."""
        return {"plm": batch.target_ids.numel()}

    def forward(self, batch: Batch, memory: Memory | None = ()) -> LossSums:
        """Return the sums for this batch, and the memory for the next step; metrics: "plm_correct".

        `memory` is the one returned for the previous segment of the same rows, or () for the first. None: no memory
        is made.
        """
        streams = self.encoder.streams(batch, memory)
        sums = self.head(_query(streams), batch.target_ids)
        term = Term("plm", sums.loss_sum, batch.target_ids.numel(), self.weight)
        return LossSums((term,), {"plm_correct": sums.correct}, memory=streams.memory)

    def logits(self, batch: Batch, memory: Memory | None = None) -> Float[Tensor, "targets vocab"]:
        """Return scores of all ids at the target positions."""
        return self.head.logits(_query(self.encoder.streams(batch, memory)))


def _query(streams: Streams) -> Tensor:
    if streams.query is None:
        raise TrainingError(
            "a batch without a factorisation order cannot train a permuted language model",
            remedy="set objective.plm and input lanes in the recipe, with which the data service draws an order",
        )
    return streams.query


def permuted_language_model(
    config: XlnetConfig, weight: float = 1.0, *, checkpoint_activations: bool = False
) -> PermutedLanguageModel:
    """Build encoder and head on the default device; weights not yet initialised (`initialise`).

    Raises:
        ModelError: the size of the vocabulary is unknown.
    """
    encoder = config.encoder(checkpoint_activations=checkpoint_activations)
    return PermutedLanguageModel(encoder, PermutationHead(encoder.embeddings.word), weight)
