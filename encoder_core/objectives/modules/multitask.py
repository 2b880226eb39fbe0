"""An encoder and the loss terms that share it. States that several terms need are computed once."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig, uses_mask_decoder
from encoder_core.heads.classification import PairHead
from encoder_core.heads.prediction import EnhancedMaskDecoder, MaskedLanguageModelHead, SpanBoundaryHead
from encoder_core.layers.any_encoder import AnyEncoder
from encoder_core.objectives.modules.losses import LossSums, ObjectiveModule, Term
from encoder_core.objectives.modules.states import States
from encoder_core.objectives.term import HeadConfig, HeadTerm, SharedParts, TermSums


class MultitaskModel(ObjectiveModule):
    """An encoder, the heads of its terms (as submodules with the heads' names), and DeBERTa's mask decoder, if any."""

    if TYPE_CHECKING:  # the terms decide which of these heads exist
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
            term.connect({other.name: other for other in terms})
        self._layered = "layers" in [term.reads for term in terms]
        self._whole = {causal: self._needs_all_states(causal) for causal in (False, True)}

    def target_counts(self, batch: Batch) -> dict[str, int]:
        return {term.name: term.target_count(batch) for term in self.terms}

    def forward(self, batch: Batch) -> LossSums:
        """Return the sums of all terms. Names of metrics begin with the term's name."""
        return self._run_terms(self.states(batch), batch)[0]

    def generate(self, batch: Batch, temperature: float) -> tuple[LossSums, Int[Tensor, " targets"]]:
        """Return the sums of all terms, and an id sampled for each target from mlm's softmax at `temperature`."""
        sums, drawn_M = self._run_terms(self.states(batch, temperature), batch)
        assert drawn_M is not None  # every generator has the term mlm
        return sums, drawn_M

    def states(self, batch: Batch, temperature: float | None = None) -> States:
        """Return the hidden states that terms read, which are computed when first read."""
        return States(
            self.encoder,
            self.decoder,
            batch,
            whole=self._whole[batch.causal],
            layered=self._layered,
            temperature=temperature,
        )

    def logits(self, batch: Batch) -> Float[Tensor, "targets vocab"]:
        """Return the language-model head's logits of all ids at the target positions; in causal rows they are computed
        from the states one token earlier.
        """
        states = self.states(batch)
        return self.head.logits(states.previous_states if batch.causal else states.target_states)

    def _needs_all_states(self, causal: bool) -> bool:
        """Return whether the last layer runs for all tokens: if a term reads all states, or several terms read the last
        layer's output. With DeBERTa's mask decoder, terms that read targets do not read that output.
        """
        reading = [term.reads for term in self.terms if term.causal == causal]
        output = [reads for reads in reading if self.decoder is None or reads != "targets"]
        return "all" in output or "layers" in output or len(output) > 1

    def _run_terms(self, states: States, batch: Batch) -> tuple[LossSums, Tensor | None]:
        sums: dict[str, TermSums] = {term.name: term.sums(states, batch) for term in self.terms}
        terms = tuple(
            Term(term.name, sums[term.name].loss_sum, sums[term.name].targets, term.weight) for term in self.terms
        )
        metrics = {
            f"{name}_{metric}": value for name, of_term in sums.items() for metric, value in of_term.metrics.items()
        }
        drawn = next((of_term.drawn for of_term in sums.values() if of_term.drawn is not None), None)
        return LossSums(terms, metrics), drawn


def multitask_model(config: ModelConfig, terms: Sequence[HeadConfig]) -> MultitaskModel:
    """Build encoder and heads of any family on the default device. Weights are not yet initialised.

    Raises:
        ModelError: the size of the vocabulary is unknown.
    """
    encoder = config.encoder()
    word = encoder.embeddings.word
    shared = SharedParts(config, word, cache(lambda: tied_head(config, word)))
    return MultitaskModel(encoder, [term.build(shared) for term in terms], mask_decoder(config))


def mask_decoder(config: ModelConfig) -> EnhancedMaskDecoder | None:
    """Build DeBERTa's enhanced mask decoder; None if the model has none."""
    return EnhancedMaskDecoder(config.max_length, config.hidden) if uses_mask_decoder(config) else None


def tied_head(config: ModelConfig, word: nn.Embedding) -> MaskedLanguageModelHead:
    """Build the family's masked-language-model head. If the family ties its decoder, it is tied to `word`."""
    return MaskedLanguageModelHead(
        config.hidden,
        word,
        activation=config.head_activation,
        eps=config.layer_norm_eps,
        bias=config.biases,
        output_scale=config.output_scale,
        bare=config.has_bare_decoder_head,
        inner=config.head_inner_width,
        decoder_bias=config.has_decoder_bias,
        tied=config.has_tied_decoder,
    )
