"""What one network costs whose states several terms read."""

from collections.abc import Iterable, Iterator, Sequence

from encoder_core.cost.activations import Activations
from encoder_core.cost.flops import is_enhanced
from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import Kernel
from encoder_core.cost.states import CountedStates
from encoder_core.families.catalogue import ModelConfig
from encoder_core.terms.term import HeadConfig, Reads


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
    whole = runs_whole([term.reads for term in terms], decodes=is_enhanced(model))
    return CountedStates(model, shape, whole, kernel)


def runs_whole(reading: Iterable[Reads], *, decodes: bool) -> bool:
    """Return whether the last layer runs for all tokens.

    It does if a term reads all of them, or if two terms read its output. Targets that DeBERTa's mask decoder predicts
    do not read its output.
    """
    output = [reads for reads in reading if not (decodes and reads == "targets")]
    return "all" in output or "layers" in output or len(output) > 1
