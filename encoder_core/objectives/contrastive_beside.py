"""Contrastive training beside other terms: SimCSE (Gao et al. 2021, section 3) on the rows that the others learn from.

A row's text as it was before anything in it was masked is read twice, and dropout differs: the two vectors belong
together, and those of all other rows of the global batch do not. The vectors are of the encoder that is used after
pretraining: the only one, or the discriminator's. They are compared as those of whole texts are (`contrastive.py`), so
the step passes twice over its microbatches, and its gradient depends on neither ranks nor microbatches.

Shapes: T tokens, R rows, D width of a vector.
"""

from abc import abstractmethod
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.objectives.contrastive import ContrastiveConfig, ContrastiveModel
from encoder_core.objectives.losses import AllExamples, CoupledObjective, LossSums, ObjectiveModule
from encoder_core.objectives.multitask import MultitaskModel
from encoder_core.objectives.replaced import ReplacedTokenDetection


class WithVectors(CoupledObjective):
    """A module of other terms and, of every row, two vectors. `vectors` has the module's own encoder.

    Both passes make the vectors first, whatever else is computed, so that they draw the same dropout.
    """

    def hold(self, vectors: ContrastiveModel) -> None:
        """Once the other terms' networks are there: parameters have one name each."""
        self._vectors = (vectors,)  # no submodule
        self.projection = vectors.projection

    @property
    def vectors(self) -> ContrastiveModel:
        return self._vectors[0]

    @abstractmethod
    def others(self, batch: Batch) -> LossSums:
        """The sums of the other terms."""

    @abstractmethod
    def counts_of_others(self, batch: Batch) -> dict[str, int]:
        """How many summands each of them has."""

    def target_counts(self, batch: Batch) -> dict[str, int]:
        """How many summands each term will have for this batch: of the vectors' one a row."""
        return self.counts_of_others(batch) | dict.fromkeys(self.vectors.terms, batch.rows)

    def forward(self, batch: Batch, memory: tuple[Tensor, ...] = ()) -> LossSums:
        """Without memory the vectors as memory, and in evaluation, which has one pass, the other terms; with what
        `couple` made of the vectors, the sums of all terms."""
        own_R2D = self.embed(batch)
        if memory:
            compared, others = self.vectors.losses(own_R2D, memory), self.others(batch)
            return LossSums(others.terms + compared.terms, others.metrics | compared.metrics)
        others = LossSums(()) if self.training else self.others(batch)
        return replace(others, memory=(own_R2D,))

    def embed(self, batch: Batch) -> Float[Tensor, "rows 2 width"]:
        """Of each row's text, read twice."""
        return self.vectors.embed(twice(batch))

    def couple(self, own: Tensor, everyone: AllExamples) -> tuple[Tensor, ...]:
        return self.vectors.couple(own, everyone)

    def losses(self, own: Tensor, coupled: tuple[Tensor, ...]) -> LossSums:
        return self.vectors.losses(own, coupled)


class MultitaskWithVectors(WithVectors, MultitaskModel):
    """One network."""

    def __init__(self, module: MultitaskModel, config: ContrastiveConfig, width: int) -> None:
        MultitaskModel.__init__(self, module.encoder, module.terms, module.decoder)
        self.hold(ContrastiveModel(self.encoder, config, width))

    def others(self, batch: Batch) -> LossSums:
        return MultitaskModel.forward(self, batch)

    def counts_of_others(self, batch: Batch) -> dict[str, int]:
        return MultitaskModel.target_counts(self, batch)


class DetectionWithVectors(WithVectors, ReplacedTokenDetection):
    """A generator, and a discriminator whose encoder makes the vectors."""

    def __init__(self, module: ReplacedTokenDetection, config: ContrastiveConfig, width: int) -> None:
        ReplacedTokenDetection.__init__(self, module.generator, module.discriminator, module.config)
        self.hold(ContrastiveModel(self.discriminator.encoder, config, width))

    def others(self, batch: Batch) -> LossSums:
        return ReplacedTokenDetection.forward(self, batch)

    def counts_of_others(self, batch: Batch) -> dict[str, int]:
        return ReplacedTokenDetection.target_counts(self, batch)


def with_vectors(module: ObjectiveModule, config: ContrastiveConfig, width: int) -> WithVectors:
    """`module`'s terms, and the contrastive one on vectors of `width`; the networks are the same objects."""
    if isinstance(module, ReplacedTokenDetection):
        return DetectionWithVectors(module, config, width)
    assert isinstance(module, MultitaskModel)  # else it is refused
    return MultitaskWithVectors(module, config, width)


def twice(batch: Batch) -> Batch:
    """Each row's text without masks, and once more after it as a row of its own: examples of two texts.

    The two have draws of their own: of row number n they are rows 2 n and 2 n + 1.
    """
    lengths_R = batch.cu_seqlens.diff().repeat_interleave(2)
    cu_seqlens = torch.nn.functional.pad(lengths_R.cumsum(0), (1, 0)).to(batch.cu_seqlens.dtype)
    begins_R = batch.cu_seqlens[:-1].repeat_interleave(2)
    total = 2 * batch.tokens.numel()
    moved_T = (begins_R - cu_seqlens[:-1]).repeat_interleave(lengths_R, output_size=total)
    at_T = torch.arange(total, device=batch.tokens.device) + moved_T
    numbers_R = torch.arange(batch.rows, device=at_T.device) if batch.numbers is None else batch.numbers
    text_T = batch.tokens.index_copy(0, batch.target_positions, batch.target_ids)
    none = batch.target_ids[:0]
    return Batch(
        tokens=text_T[at_T],
        cu_seqlens=cu_seqlens,
        max_length=batch.max_length,
        positions=batch.positions[at_T],
        target_positions=none,
        target_ids=none,
        segments=_moved(batch.segments, at_T),
        languages=_moved(batch.languages, at_T),
        restarted=_moved(batch.restarted, at_T),
        numbers=torch.stack([2 * numbers_R, 2 * numbers_R + 1], 1).flatten(),
        group=2,
        host=None if batch.host is None else twice(batch.host),
    )


def _moved(of_T: Tensor | None, at_T: Tensor) -> Tensor | None:
    return None if of_T is None else of_T[at_T]
