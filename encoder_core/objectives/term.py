"""The device half of a term that shares one network with others, and the states of that network.

The other half is the term's description (`terms/term.py`). The package's README, "Terms", explains how to write a term.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig
from encoder_core.heads.prediction import EnhancedMaskDecoder, MaskedLanguageModelHead
from encoder_core.layers.any_encoder import AnyEncoder
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder
from encoder_core.terms.term import HeadConfig, last_weight


class States:
    """The hidden states of one batch, each computed when a term first asks for it.

    DeBERTa's last layer runs for all tokens only if a term needs that, or if several read its output. Otherwise it
    runs for the requested tokens.

    Attributes:
        layered: whether a term reads the states of all layers, which are then stored.
        temperature: temperature at which an id is drawn for every target; None: none are drawn.
    """

    def __init__(
        self,
        encoder: AnyEncoder,
        decoder: EnhancedMaskDecoder | None,
        batch: Batch,
        *,
        whole: bool,
        layered: bool = False,
        temperature: float | None = None,
    ) -> None:
        self._encoder, self._decoder, self._batch, self._whole = encoder, decoder, batch, whole
        self._layered = layered
        self.temperature = temperature

    @cached_property
    def all_states(self) -> Float[Tensor, "tokens hidden"]:
        """The last layer's output."""
        if self._layered:
            return self.layers[-1]
        if self._decoder is None:
            last_TH: Tensor = self._encoder(self._batch)
            return last_TH
        return self._last_two_states[1]

    @cached_property
    def layers(self) -> tuple[Float[Tensor, "tokens hidden"], ...]:
        """The embeddings, and the output of each layer."""
        assert not isinstance(self._encoder, TwoStreamEncoder)  # this term does not predict XLNet's tokens
        return tuple(self._encoder.states(self._batch))

    def at(
        self, at_N: Int[Tensor, " positions"], most: int | None = None
    ) -> Float[Tensor, "positions hidden"]:
        """Return the last layer's output at sorted flat positions. `most`: largest number of them in a row, if they
        are not the targets.
        """
        if self._whole or not isinstance(self._encoder, DisentangledEncoder):
            return self.all_states.index_select(0, at_N)
        if self._decoder is None:
            return self._encoder.at(at_N, self._batch, most)
        before_TH = self._last_layer_input
        queries_NH = before_TH.index_select(0, at_N)
        return self._encoder.rerun_last_layer(queries_NH, at_N, before_TH, self._batch, most=most)

    @cached_property
    def target_states(self) -> Float[Tensor, "targets hidden"]:
        """The states from which hidden tokens are predicted: the last layer's output at the targets, or the mask
        decoder's.
        """
        return self.states_for(self._batch)

    def states_for(self, batch: Batch) -> Float[Tensor, "targets hidden"]:
        """Return the same for the targets of `batch`, which has the rows of this batch."""
        if self._decoder is None:
            return self.at(batch.target_positions)
        assert isinstance(self._encoder, DisentangledEncoder)  # only this family has the decoder
        return self._decoder.decode(self._encoder, self._last_layer_input, batch)

    @cached_property
    def _last_layer_input(self) -> Tensor:
        assert isinstance(self._encoder, DisentangledEncoder)
        return self._last_two_states[0] if self._whole else self._encoder.last_layer_input(self._batch)

    @cached_property
    def _last_two_states(self) -> tuple[Tensor, Tensor]:
        if self._layered:
            return self.layers[-2], self.layers[-1]
        *_, before_TH, last_TH = self._encoder.states(self._batch)
        assert isinstance(before_TH, Tensor)
        assert isinstance(last_TH, Tensor)
        return before_TH, last_TH


@dataclass(frozen=True)
class TermSums:
    """A term on one microbatch.

    Attributes:
        loss_sum: scalar, fp32 or wider, summed over targets.
        targets: number of summands; equals `HeadTerm.targets` of the batch.
        metrics: sums by name ("correct"), scalars without gradient; `encoder_core/train/metrics.py` makes figures of
            them.
        drawn: an id for each target, if `States.temperature` asks the masked-token term for them.
    """

    loss_sum: Num[Tensor, ""]
    targets: int
    metrics: Mapping[str, Num[Tensor, ""]] = field(default_factory=dict)
    drawn: Int[Tensor, " targets"] | None = None


@dataclass(frozen=True)
class Shared:
    """What terms share, on the default device, its weights not yet initialised.

    Attributes:
        model: configuration of the network.
        word: its word embeddings.
        head: function that returns the head of token ids, the same at every call.
    """

    model: ModelConfig
    word: nn.Embedding
    head: Callable[[], MaskedLanguageModelHead]


class HeadTerm(ABC):
    """The device half of a term that shares one network's encoder with others.

    It is not a module: the network owns `heads`, under the names of their parameters in checkpoints. A head without
    targets still runs, on no rows, so that every parameter takes part in the backward pass on every rank. A head may
    be a frozen network of the term (`requires_grad_(False)`, and a `train` that keeps it in evaluation mode). The
    engine then gives it neither master weights nor moments.

    A subclass names the description that it is the half of (`class Foo(HeadTerm, of=FooConfig)`), and is called with
    one and with what terms share.

    Attributes:
        halves: device half of each kind of description whose module was imported.
        name: name of the term; key of `target_counts` and of metrics.
        weight: weight of the term; a schedule's final weight, while the trainer has the weight of each step.
        reads: the states that it reads.
        causal: whether it has targets in causal rows, and none in others.
        heads: modules that are trained with the term, by name.
    """

    halves: ClassVar[dict[type, "Callable[[Any, Shared], HeadTerm]"]] = {}

    def __init_subclass__(cls, *, of: type) -> None:
        HeadTerm.halves[of] = cls

    def __init__(self, config: "HeadConfig", heads: Mapping[str, nn.Module]) -> None:
        self.name = config.name
        self.weight = last_weight(config.weight)
        self.reads = config.reads
        self.causal = config.causal
        self.heads = heads

    def connect(self, others: Mapping[str, "HeadTerm"]) -> None:
        """Receive all terms that share the network, including itself, by name, before the first batch.

        This is for a term that uses another's head or result; most terms ignore it.
        """
        return

    @abstractmethod
    def targets(self, batch: Batch) -> int:
        """Return how many summands the term has for this batch; known before the forward pass."""

    @abstractmethod
    def sums(self, states: States, batch: Batch) -> TermSums:
        """Compute the term on the network's states of the batch."""
