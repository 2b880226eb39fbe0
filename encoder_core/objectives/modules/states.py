"""The hidden states of a network, which several terms read."""

from functools import cached_property

from jaxtyping import Float, Int
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.heads.prediction import EnhancedMaskDecoder
from encoder_core.layers.any_encoder import AnyEncoder
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder


class States:
    """The hidden states of one batch, each computed when a term first asks for it.

    DeBERTa's last layer runs for all tokens (`whole`) only if a term reads all states, or several terms read its
    output. Otherwise it runs for the requested tokens.

    Args:
        layered: whether a term reads the states of all layers, which are then stored.
        temperature: temperature at which an id is sampled for every target; None: no ids are sampled.
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
        assert not isinstance(self._encoder, TwoStreamEncoder)  # terms that read all layers cannot train XLNet
        return tuple(self._encoder.states(self._batch))

    def states_at(
        self, at_N: Int[Tensor, " positions"], max_per_row: int | None = None
    ) -> Float[Tensor, "positions hidden"]:
        """Return the last layer's output at the tokens whose indices, in ascending order, are `at_N`. `max_per_row`:
        largest number of them in a row; see `rows_of_queries`.
        """
        if self._whole or not isinstance(self._encoder, DisentangledEncoder):
            return self.all_states.index_select(0, at_N)
        if self._decoder is None or self._encoder.ends_with_convolution:
            return self._encoder.states_at(at_N, self._batch, max_per_row)
        before_TH = self._last_layer_input
        queries_NH = before_TH.index_select(0, at_N)
        return self._encoder.rerun_last_layer(queries_NH, at_N, before_TH, self._batch, max_per_row=max_per_row)

    @cached_property
    def target_states(self) -> Float[Tensor, "targets hidden"]:
        """The states from which masked tokens are predicted: the last layer's output at the targets, or the output of
        DeBERTa's mask decoder.
        """
        return self.states_for(self._batch)

    @property
    def previous_states(self) -> Float[Tensor, "targets hidden"]:
        """The last layer's output at the token before each target. A row's first token is never a target."""
        return self.all_states.index_select(0, self._batch.target_positions - 1)

    def states_for(self, batch: Batch) -> Float[Tensor, "targets hidden"]:
        """Return `target_states` for the targets of `batch`, which must have the same rows as this batch."""
        if self._decoder is None:
            return self.states_at(batch.target_positions)
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
