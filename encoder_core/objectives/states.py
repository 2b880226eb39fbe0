"""The states of one network that several terms read: what each needs is computed once."""

from functools import cached_property

from jaxtyping import Float, Int
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.families.build import AnyEncoder
from encoder_core.heads.prediction import EnhancedMaskDecoder
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder


class States:
    """The hidden states of one batch, each computed when a term first asks for it.

    DeBERTa's last layer runs for all tokens only if some term needs that, or several read its output. Otherwise it runs
    for the tokens that are asked for.

    Attributes:
        layered: some term reads the states of all layers, which are kept then.
        temperature: an id is to be drawn for every target, at this temperature; None for none.
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
    def everywhere(self) -> Float[Tensor, "tokens hidden"]:
        """The last layer's output."""
        if self._layered:
            return self.layers[-1]
        if self._decoder is None:
            last_TH: Tensor = self._encoder(self._batch)
            return last_TH
        return self._last_two[1]

    @cached_property
    def layers(self) -> tuple[Float[Tensor, "tokens hidden"], ...]:
        """The embeddings, and the output of each layer."""
        assert not isinstance(self._encoder, TwoStreamEncoder)  # whose tokens no such term predicts
        return tuple(self._encoder.states(self._batch))

    def at(
        self, at_N: Int[Tensor, " positions"], most: int | None = None
    ) -> Float[Tensor, "positions hidden"]:
        """The last layer's output at sorted flat positions; `most` of them in a row, where those are no targets."""
        if self._whole or not isinstance(self._encoder, DisentangledEncoder):
            return self.everywhere.index_select(0, at_N)
        if self._decoder is None:
            return self._encoder.at(at_N, self._batch, most)
        before_TH = self._before_last
        queries_NH = before_TH.index_select(0, at_N)
        return self._encoder.look_again(queries_NH, at_N, before_TH, self._batch, most=most)

    @cached_property
    def at_targets(self) -> Float[Tensor, "targets hidden"]:
        """What hidden tokens are predicted from: the last layer's output there, or the mask decoder's."""
        return self.predicting(self._batch)

    def predicting(self, batch: Batch) -> Float[Tensor, "targets hidden"]:
        """The same for other targets: those of `batch`, whose rows are this batch's."""
        if self._decoder is None:
            return self.at(batch.target_positions)
        assert isinstance(self._encoder, DisentangledEncoder)  # only this family has the decoder
        return self._decoder.decode(self._encoder, self._before_last, batch)

    @cached_property
    def _before_last(self) -> Tensor:
        assert isinstance(self._encoder, DisentangledEncoder)
        return self._last_two[0] if self._whole else self._encoder.before_last(self._batch)

    @cached_property
    def _last_two(self) -> tuple[Tensor, Tensor]:
        if self._layered:
            return self.layers[-2], self.layers[-1]
        *_, before_TH, last_TH = self._encoder.states(self._batch)
        assert isinstance(before_TH, Tensor)
        assert isinstance(last_TH, Tensor)
        return before_TH, last_TH
