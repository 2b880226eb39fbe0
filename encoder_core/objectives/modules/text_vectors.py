"""Contrastive training of text vectors: each query finds its positive among the texts of the whole global batch.

The loss of an example depends on all others, so a step runs twice over its microbatches (GradCache: Gao et al. 2021,
arXiv 2101.06983). The first pass, without gradients, computes the vectors of all texts; from these the loss and the
gradients of the vectors are computed. The second pass computes the gradients of the weights. So a rank needs memory for
the graph of one microbatch, and only for the vectors of the rest of the batch. The gradient depends neither on the
number of ranks nor on the size of microbatches.

SimCSE (Gao et al. 2021, section 3) is the case of an example that is the same text twice, encoded with different
dropout. With other terms, an example is a row's text before masking, encoded twice. Vectors come from the encoder that
is used after pretraining: the discriminator's, or the only one.

Equal texts do not count as negatives of each other (`info_nce`). To recognise them, the first pass appends a
fingerprint (hash) of a text's tokens to its vector.

Shapes: T tokens, R rows (texts), G texts of an example, n examples, D width of a vector.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.batch import Batch, duplicate_rows
from encoder_core.layers.any_encoder import AnyEncoder
from encoder_core.layers.rows import Rows
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder
from encoder_core.objectives.modules.detection import ReplacedTokenDetection
from encoder_core.objectives.modules.info_nce import Contrast, cached_loss, info_nce
from encoder_core.objectives.modules.losses import AllExamples, CoupledObjective, LossSums, ObjectiveModule, Term
from encoder_core.objectives.modules.multitask import MultitaskModel

_TERM_NAME = "contrastive"
_METRICS = ("correct", "positive", "negative")  # fields of `Contrast` that are reported


class ContrastiveModel(CoupledObjective):
    """An encoder with pooling, trained by the contrastive loss alone. Every row is a text; `Batch.group` successive
    rows are an example.

    Terms: "contrastive", whose targets are examples; with Matryoshka widths one term for each, such as
    "contrastive_768".

    Args:
        width: width of the encoder's states.
        weight: factor of each term in the loss.

    The other arguments are those of `ContrastiveConfig`. XLNet's initial query state is frozen, because vectors do not
    depend on it.
    """

    def __init__(
        self,
        encoder: AnyEncoder,
        width: int,
        *,
        matryoshka: Sequence[int],
        weight: float,
        temperature: float,
        pooling: Literal["mean", "cls"],
        projection: bool,
        normalize: bool,
        bidirectional: bool,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        if isinstance(encoder, TwoStreamEncoder):
            encoder.mask.requires_grad_(False)
        self.projection = nn.Linear(width, width) if projection else None
        self.terms = {f"{_TERM_NAME}_{cut}": cut for cut in matryoshka} or {_TERM_NAME: width}  # width by term
        self.weight, self.temperature, self.pooling = weight, temperature, pooling
        self.normalize, self.bidirectional = normalize, bidirectional

    def target_counts(self, batch: Batch) -> dict[str, int]:
        return dict.fromkeys(self.terms, batch.rows // batch.group)

    def forward(self, batch: Batch, memory: tuple[Tensor, ...] = ()) -> LossSums:
        """First pass (no `memory`): return vectors and fingerprints as memory, and no terms. Second pass: return the
        batch's sums; `memory` comes from `couple`.
        """
        vectors_nGD = self.embed(batch)
        if not memory:
            return LossSums((), memory=(append_fingerprints(vectors_nGD, batch),))
        return self.losses(vectors_nGD, memory)

    def embed(self, batch: Batch) -> Float[Tensor, "examples texts width"]:
        """Return the vectors of the texts, fp32 or wider, not yet normalised."""
        # Idle batches have a factorisation order; without it XLNet's query stream does not run.
        states_TD = self.encoder(replace(batch, order=None))
        mean = self.pooling == "mean"
        pooled_RD = _mean_states(states_TD, batch) if mean else self._first_states(states_TD, batch)
        if self.projection is not None:
            pooled_RD = self.projection(pooled_RD.to(self.projection.weight.dtype)).tanh()
        wide = torch.promote_types(pooled_RD.dtype, torch.float32)
        return pooled_RD.to(wide).view(batch.rows // batch.group, batch.group, pooled_RD.shape[-1])

    def _first_states(self, states_TD: Tensor, batch: Batch) -> Tensor:
        """Return the states of the classification tokens: a row's last in XLNet, its first in all other families."""
        last = isinstance(self.encoder, TwoStreamEncoder)
        at_R = batch.cu_seqlens[1:] - 1 if last else batch.cu_seqlens[:-1]
        return states_TD.index_select(0, at_R)

    @torch.no_grad()
    def couple(self, own: Tensor, examples: AllExamples) -> tuple[Tensor, ...]:
        """Return a tensor [n, terms, 4] of this rank's examples: the loss and three metrics. For each term follows a
        tensor [n, G, width]: the gradients of their vectors. Collective.

        The gradients are those of the sum of the losses of all ranks' examples. `own`: this rank's vectors, with
        fingerprints.
        """
        every = examples.gather(own)
        found = [self._contrast(own, every, examples, width) for width in self.terms.values()]
        figures = [torch.stack([c.loss, c.correct, c.positive, c.negative], dim=1) for c in found]
        return (torch.stack(figures, dim=1), *(contrast.gradient for contrast in found))

    def _contrast(self, own: Tensor, every: Tensor, examples: AllExamples, width: int) -> Contrast:
        """Return loss and gradient for vectors truncated to `width`."""
        cut = own[..., :width].detach().requires_grad_()
        with torch.enable_grad():
            compared = self._compared_vectors(cut)
        found = info_nce(
            compared.detach(),
            self._compared_vectors(every[..., :width]),
            examples,
            texts_NG=_extract_fingerprints(every),
            temperature=self.temperature,
            bidirectional=self.bidirectional,
        )
        (gradient,) = torch.autograd.grad(compared, cut, found.gradient)
        return replace(found, gradient=gradient)

    def _compared_vectors(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1) if self.normalize else vectors.clone()

    def losses(self, own: Tensor, coupled: tuple[Tensor, ...]) -> LossSums:
        """Return the terms of the examples with the vectors `own`, with the gradients and metrics that `couple` has
        computed. Fingerprints appended to the vectors are ignored.
        """
        figures, *gradients = coupled
        sums = figures.sum(0)
        terms = tuple(
            Term(
                name,
                cached_loss(own[..., :width], gradient, of_term[0]),
                len(own),
                self.weight,
                part=_TERM_NAME,
            )
            for (name, width), gradient, of_term in zip(self.terms.items(), gradients, sums, strict=True)
        )
        metrics = {
            f"{name}_{figure}": value
            for name, of_term in zip(self.terms, sums, strict=True)
            for figure, value in zip(_METRICS, of_term[1:], strict=True)
        }
        return LossSums(terms, metrics)


_PART_BITS = 21  # a 63-bit fingerprint is stored as three numbers, each exact in fp32 (24 bits)
_PART_SHIFTS = (0, _PART_BITS, 2 * _PART_BITS)


def append_fingerprints(vectors_nGD: Tensor, batch: Batch) -> Float[Tensor, "examples texts width_plus_3"]:
    """Return the vectors, each followed by its text's fingerprint as three integers in the vectors' dtype."""
    parts = [(batch.fingerprints >> shift) % (1 << _PART_BITS) for shift in _PART_SHIFTS]
    parts_nG3 = torch.stack(parts, -1).to(vectors_nGD.dtype).view(*vectors_nGD.shape[:2], len(_PART_SHIFTS))
    return torch.cat([vectors_nGD, parts_nG3], -1)


def _extract_fingerprints(with_fingerprints_NGX: Tensor) -> Int[Tensor, "all texts"]:
    """Return the fingerprints that `append_fingerprints` has appended to the vectors."""
    parts = with_fingerprints_NGX[..., -len(_PART_SHIFTS) :].long().unbind(-1)
    return sum((part << shift for part, shift in zip(parts, _PART_SHIFTS, strict=True)), torch.zeros_like(parts[0]))


def _mean_states(states_TD: Tensor, batch: Batch) -> Float[Tensor, "rows width"]:
    """Return the mean of each row's hidden states, fp32 or wider."""
    wide = torch.promote_types(states_TD.dtype, torch.float32)
    return Rows.from_batch(batch).pad(states_TD).sum(1, dtype=wide) / batch.cu_seqlens.diff()[:, None]


class WithVectors(CoupledObjective):
    """Base of modules that train other terms and, with the same encoder, the contrastive term on rows read twice.

    Both passes compute the vectors before other terms, so that both draw the same dropout.

    Attributes:
        others: class of the module that trains the other terms.
    """

    others: ClassVar[type[ObjectiveModule]]

    def set_vectors_model(self, vectors: ContrastiveModel) -> None:
        """Set the model of the vectors. Of its submodules only `projection` is registered, so that every parameter has
        one name. Call it after building the other terms' networks."""
        self._vectors = (vectors,)  # in a tuple, so that torch does not register it as a submodule
        self.projection = vectors.projection

    @property
    def vectors(self) -> ContrastiveModel:
        return self._vectors[0]

    def target_counts(self, batch: Batch) -> dict[str, int]:
        """Return each term's number of targets in this batch; contrastive terms have one for each row."""
        return self.others.target_counts(self, batch) | dict.fromkeys(self.vectors.terms, batch.rows)

    def forward(self, batch: Batch, memory: tuple[Tensor, ...] = ()) -> LossSums:
        """First pass (no `memory`): return vectors and fingerprints as memory; in evaluation also other terms' sums.
        Second pass: return all terms' sums; `memory` comes from `couple`.
        """
        own_R2D = self.embed(batch)
        if memory:
            compared, others = self.vectors.losses(own_R2D, memory), self.others.forward(self, batch)
            return LossSums(others.terms + compared.terms, others.metrics | compared.metrics)
        others = LossSums(()) if self.training else self.others.forward(self, batch)
        return replace(others, memory=(append_fingerprints(own_R2D, duplicate_rows(batch)),))

    def embed(self, batch: Batch) -> Float[Tensor, "rows 2 width"]:
        """Return two vectors of each row's unmasked text, encoded twice with different dropout."""
        return self.vectors.embed(duplicate_rows(batch))

    def couple(self, own: Tensor, examples: AllExamples) -> tuple[Tensor, ...]:
        return self.vectors.couple(own, examples)

    def losses(self, own: Tensor, coupled: tuple[Tensor, ...]) -> LossSums:
        return self.vectors.losses(own, coupled)


class MultitaskWithVectors(WithVectors, MultitaskModel):
    """A `MultitaskModel` with the contrastive term."""

    others = MultitaskModel

    def __init__(self, module: MultitaskModel, vectors: ContrastiveModel) -> None:
        MultitaskModel.__init__(self, module.encoder, module.terms, module.decoder)
        self.set_vectors_model(vectors)


class DetectionWithVectors(WithVectors, ReplacedTokenDetection):
    """A `ReplacedTokenDetection` with the contrastive term, whose vectors the discriminator's encoder computes."""

    others = ReplacedTokenDetection

    def __init__(self, module: ReplacedTokenDetection, vectors: ContrastiveModel) -> None:
        ReplacedTokenDetection.__init__(
            self,
            module.generator,
            module.discriminator,
            weight=module.weight,
            temperature=module.temperature,
        )
        self.set_vectors_model(vectors)


def add_vectors(module: ObjectiveModule, vectors: ContrastiveModel) -> WithVectors:
    """Return `module` with the contrastive term added. `vectors` must have the module's `task_encoder` as encoder."""
    if isinstance(module, ReplacedTokenDetection):
        return DetectionWithVectors(module, vectors)
    assert isinstance(module, MultitaskModel)  # the recipe's checks refuse other objectives
    return MultitaskWithVectors(module, vectors)
