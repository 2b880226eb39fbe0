"""What a network computes for its terms, counted: the products of each part that runs, and what the part keeps.

It mirrors `States` (encoder_core/objectives/term.py): a term asks it for what the term reads there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from encoder_core.cost.activations import Activations, drops_of, kept_by_embeddings, kept_by_layers
from encoder_core.cost.flops import (
    before_last,
    disentangled_size,
    encoder,
    is_enhanced,
    look_again,
    passes,
)
from encoder_core.cost.products import Product, Shape, times
from encoder_core.cost.saved import Kernel, Layer, Saved, looking_again
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import Deberta


@dataclass(frozen=True)
class CountedStates:
    """The states of one network on one microbatch.

    Attributes:
        model: of the network.
        shape: of the microbatch.
        whole: DeBERTa's last layer runs for all tokens, since some term needs that, or several read its output.
        kernel: of attention, which decides what is kept.
    """

    model: ModelConfig
    shape: Shape
    whole: bool = False
    kernel: Kernel = "gpu"

    def encoder(self) -> Iterator[Product]:
        """All that runs whatever the terms read: every layer, or every layer but DeBERTa's last."""
        if isinstance(self.model, Deberta) and self._defers:
            return before_last(self.model, self.shape)
        return encoder(self.model, self.shape)

    def at_targets(self, per_row: int | None = None) -> Iterator[Product]:
        """The states that tokens are predicted from; `per_row`: of other places than the targets."""
        if isinstance(self.model, Deberta) and (self._defers or is_enhanced(self.model)):
            asked = self.shape.targets_per_row if per_row is None else per_row
            yield from times(look_again(self.model, self.shape, asked), passes(self.model))

    def at(self, per_row: int) -> Iterator[Product]:
        """The last layer's output at so many tokens of each row."""
        if isinstance(self.model, Deberta) and self._defers:
            yield from look_again(self.model, self.shape, per_row)

    def encoder_keeps(self) -> Activations:
        """Of `encoder`."""
        embeddings = tuple(kept_by_embeddings(self.model, self.shape, self.kernel))
        if not self._defers:
            return Activations(embeddings, tuple(kept_by_layers(self.model, self.shape, self.kernel)))
        before = Saved("states before the last layer", self.shape.tokens * self.model.hidden)
        layers = kept_by_layers(self.model, self.shape, self.kernel, but=1)
        return Activations((*embeddings, before), tuple(layers))

    def at_targets_keeps(self, per_row: int | None = None) -> Activations:
        """Of `at_targets`."""
        if not isinstance(self.model, Deberta) or not (self._defers or is_enhanced(self.model)):
            return NOTHING
        asked = self.shape.targets_per_row if per_row is None else per_row
        return Activations((), (replace(self._looking_again(self.model, asked), count=passes(self.model)),))

    def at_keeps(self, per_row: int) -> Activations:
        """Of `at`."""
        if not isinstance(self.model, Deberta) or not self._defers:
            return NOTHING
        return Activations((), (self._looking_again(self.model, per_row),))

    @property
    def _defers(self) -> bool:
        """Whether the last layer runs for the tokens that are asked for alone."""
        return isinstance(self.model, Deberta) and not self.whole

    def _looking_again(self, model: Deberta, per_row: int) -> Layer:
        return looking_again(
            disentangled_size(model, self.shape.length),
            self.shape.rows,
            self.shape.length,
            per_row,
            kernel=self.kernel,
            drops=drops_of(model),
        )


NOTHING = Activations((), ())
