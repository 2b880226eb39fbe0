"""One encoder and the loss terms that share it; states that several terms need are computed once."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.cost.activations import Activations
from encoder_core.cost.flops import is_enhanced
from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import Kernel
from encoder_core.cost.states import CountedStates
from encoder_core.families.catalogue import AnyEncoder, ModelConfig, build_encoder
from encoder_core.heads.classification import PairHead
from encoder_core.heads.prediction import EnhancedMaskDecoder, MaskedLanguageModelHead, SpanBoundaryHead
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.encoder import Embeddings
from encoder_core.objectives.losses import LossSums, ObjectiveModule, Term
from encoder_core.objectives.term import HeadConfig, HeadTerm, Reads, States, TermSums


class MultitaskModel(ObjectiveModule):
    """An encoder, the heads of its terms under their own names, and the mask decoder if the model is a DeBERTa with
    one.
    """

    if TYPE_CHECKING:  # which of them there are, the terms decide
        head: MaskedLanguageModelHead
        pair_head: PairHead
        boundary_head: SpanBoundaryHead

    def __init__(
        self, encoder: AnyEncoder, terms: Sequence[HeadTerm], decoder: EnhancedMaskDecoder | None = None
    ) -> None:
        super().__init__()
        self.encoder = encoder
        for term in terms:
            for name, head in term.heads.items():
                self.add_module(name, head)
        self.decoder = decoder
        self.terms = tuple(terms)
        for term in terms:
            term.meet({other.name: other for other in terms})
        reading = [term.reads for term in terms]
        self._layered = "layers" in reading
        self._whole = _whole(reading, decodes=decoder is not None)

    def target_counts(self, batch: Batch) -> dict[str, int]:
        """Return how many summands each term has for this batch; known before the forward pass."""
        return {term.name: term.targets(batch) for term in self.terms}

    def forward(self, batch: Batch) -> LossSums:
        """Return the sums of all terms; their metrics begin with the term's name."""
        return self._run(self.states(batch), batch)[0]

    def generate(self, batch: Batch, temperature: float) -> tuple[LossSums, Int[Tensor, " targets"]]:
        """Return the sums, and an id drawn for each target from the masked-token term's softmax at `temperature`."""
        sums, drawn_M = self._run(self.states(batch, temperature), batch)
        assert drawn_M is not None  # a generator has the masked-token term
        return sums, drawn_M

    def states(self, batch: Batch, temperature: float | None = None) -> States:
        """Return the states that terms read; nothing is computed yet."""
        return States(
            self.encoder,
            self.decoder,
            batch,
            whole=self._whole,
            layered=self._layered,
            temperature=temperature,
        )

    def logits(self, batch: Batch) -> Float[Tensor, "targets vocab"]:
        """Return scores of all ids at the target positions, by the masked-language-model head."""
        return self.head.logits(self.states(batch).at_targets)

    def _run(self, states: States, batch: Batch) -> tuple[LossSums, Tensor | None]:
        sums: dict[str, TermSums] = {term.name: term.sums(states, batch) for term in self.terms}
        terms = tuple(
            Term(term.name, sums[term.name].loss_sum, sums[term.name].targets, term.weight)
            for term in self.terms
        )
        metrics = {
            f"{name}_{metric}": value
            for name, of_term in sums.items()
            for metric, value in of_term.metrics.items()
        }
        drawn = next((of_term.drawn for of_term in sums.values() if of_term.drawn is not None), None)
        return LossSums(terms, metrics), drawn


def multitask_model(
    config: ModelConfig,
    terms: Sequence[HeadConfig],
    *,
    embeddings: Embeddings | None = None,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> MultitaskModel:
    """Build encoder and heads of any family on the default device; weights not yet initialised (`initialise`).

    Args:
        embeddings: embeddings to share with another network; None: its own.

    Raises:
        ModelError: the size of the vocabulary is unknown.
    """
    encoder = build_encoder(
        config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
    )
    on_device = [term.device(config, encoder.embeddings.word) for term in terms]
    return MultitaskModel(encoder, on_device, mask_decoder(config))


def multitask_products(model: ModelConfig, terms: Sequence[HeadConfig], shape: Shape) -> Iterator[Product]:
    """Yield the matrix products of the network and all of these terms for one microbatch."""
    states = _counted(model, terms, shape)
    yield from states.encoder()
    for term in terms:
        yield from term.products(states)


def multitask_keeps(
    model: ModelConfig, terms: Sequence[HeadConfig], shape: Shape, kernel: Kernel
) -> Activations:
    """Return what the network and these terms save for the backward pass."""
    states = _counted(model, terms, shape, kernel)
    return sum((term.keeps(states) for term in terms), states.encoder_keeps())


def _counted(
    model: ModelConfig, terms: Sequence[HeadConfig], shape: Shape, kernel: Kernel = "gpu"
) -> CountedStates:
    whole = _whole([term.reads for term in terms], decodes=is_enhanced(model))
    return CountedStates(model, shape, whole, kernel)


def _whole(reading: Iterable[Reads], *, decodes: bool) -> bool:
    """Return whether the last layer runs for all tokens.

    It does if a term reads all of them, or if two terms read its output. Targets that DeBERTa's mask decoder predicts
    do not read its output.
    """
    output = [reads for reads in reading if not (decodes and reads == "targets")]
    return "all" in output or "layers" in output or len(output) > 1


def mask_decoder(config: ModelConfig) -> EnhancedMaskDecoder | None:
    """Return DeBERTa's mask decoder, if the configuration has it."""
    return EnhancedMaskDecoder(config.max_length, config.hidden) if is_enhanced(config) else None
