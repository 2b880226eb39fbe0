"""The cost of a network's states for its terms: the products of each part that runs, and what it saves.

It mirrors `States` (encoder_core/objectives/term.py): a term asks it for the same states that it reads there.
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
    """The states of one network on one microbatch, for counting.

    Attributes:
        model: configuration of the network.
        shape: shape of the microbatch.
        whole: whether DeBERTa's last layer runs for all tokens, because a term needs that, or several read its output.
        kernel: kind of attention kernel, which decides what is saved.
    """

    model: ModelConfig
    shape: Shape
    whole: bool = False
    kernel: Kernel = "gpu"

    def encoder(self) -> Iterator[Product]:
        """Return the products that run for any terms: every layer, or every layer but DeBERTa's last."""
        if isinstance(self.model, Deberta) and self._defers:
            return before_last(self.model, self.shape)
        return encoder(self.model, self.shape)

    def at_targets(self, per_row: int | None = None) -> Iterator[Product]:
        """Yield the products of the states from which tokens are predicted. `per_row`: number of places if they are
        not the targets.
        """
        if isinstance(self.model, Deberta) and (self._defers or is_enhanced(self.model)):
            asked = self.shape.targets_per_row if per_row is None else per_row
            yield from times(look_again(self.model, self.shape, asked), passes(self.model))

    def at(self, per_row: int) -> Iterator[Product]:
        """Yield the products of the last layer's output at `per_row` tokens of each row."""
        if isinstance(self.model, Deberta) and self._defers:
            yield from look_again(self.model, self.shape, per_row)

    def encoder_keeps(self) -> Activations:
        """Return what `encoder` saves."""
        embeddings = tuple(kept_by_embeddings(self.model, self.shape, self.kernel))
        if not self._defers:
            return Activations(embeddings, tuple(kept_by_layers(self.model, self.shape, self.kernel)))
        before = Saved("states before the last layer", self.shape.tokens * self.model.hidden)
        layers = kept_by_layers(self.model, self.shape, self.kernel, but=1)
        return Activations((*embeddings, before), tuple(layers))

    def at_targets_keeps(self, per_row: int | None = None) -> Activations:
        """Return what `at_targets` saves."""
        if not isinstance(self.model, Deberta) or not (self._defers or is_enhanced(self.model)):
            return NOTHING
        asked = self.shape.targets_per_row if per_row is None else per_row
        return Activations((), (replace(self._looking_again(self.model, asked), count=passes(self.model)),))

    def at_keeps(self, per_row: int) -> Activations:
        """Return what `at` saves."""
        if not isinstance(self.model, Deberta) or not self._defers:
            return NOTHING
        return Activations((), (self._looking_again(self.model, per_row),))

    @property
    def _defers(self) -> bool:
        """Whether the last layer runs only for the requested tokens."""
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
