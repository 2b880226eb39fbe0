"""The terms of an objective together: why they cannot be combined, and what they cost; first those of one network."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from encoder_core.cost.activations import Activations
from encoder_core.cost.flops import is_enhanced
from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import Kernel
from encoder_core.cost.states import CountedStates
from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import CHUNKS
from encoder_core.terms.term import (
    AroundConfig,
    HeadConfig,
    ModuleConfig,
    Reads,
    Refusal,
    Setting,
    TermConfig,
)


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


def refusals(setting: Setting) -> list[Refusal]:
    """Return why the terms of `setting` cannot be trained there, each reason once, in the words of its term."""
    found = [refusal for term in setting.terms.values() for refusal in term.refusals(setting)]
    whole = [
        name
        for name, term in setting.terms.items()
        if isinstance(term, ModuleConfig) and not isinstance(term, AroundConfig)
    ]
    if len(whole) > 1 and not found:
        found.append(
            Refusal(
                ("objective",),
                f"{' and '.join(whole)} cannot be combined: each builds the whole module",
                "keep one of them",
            )
        )
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Parts:
    """The terms of an objective by what they build: heads of one network, the whole module, or what is around it."""

    heads: Sequence[HeadConfig]
    whole: ModuleConfig | None
    around: AroundConfig | None

    @classmethod
    def of(cls, terms: Mapping[str, TermConfig]) -> "Parts":
        """Sort the terms. A term that can be around others is the whole module if it is the only one."""
        around = next((term for term in terms.values() if isinstance(term, AroundConfig)), None)
        if around is not None and len(terms) == 1:
            return cls((), around, None)
        heads = [term for term in terms.values() if isinstance(term, HeadConfig)]
        others = (t for t in terms.values() if isinstance(t, ModuleConfig) and t is not around)
        return cls(heads, next(others, None), around)


def products(model: ModelConfig, terms: Mapping[str, TermConfig], shape: Shape) -> list[Product]:
    """Return all matrix products of one microbatch, in all networks and heads. Products of one name and size are one
    entry.
    """
    parts = Parts.of(terms)
    around = iter(()) if parts.around is None else parts.around.products_around(model, shape)
    if parts.whole is None:
        others = multitask_products(model, parts.heads, shape)
    else:
        others = parts.whole.products(model, parts.heads, shape)
    counts: dict[Product, int] = {}
    for product in chain(around, others):
        key = replace(product, count=1)
        counts[key] = counts.get(key, 0) + product.count
    return [replace(product, count=count) for product, count in counts.items() if count]


def first_pass(model: ModelConfig, terms: Mapping[str, TermConfig], shape: Shape) -> int:
    """Return the FLOPs of the pass that computes texts' vectors before their gradients are known; 0 if none are
    compared.
    """
    parts = Parts.of(terms)
    if parts.around is not None:
        vectors = parts.around.products_around(model, shape)
    elif isinstance(parts.whole, AroundConfig):
        vectors = parts.whole.products(model, parts.heads, shape)
    else:
        return 0
    return sum(product.forward for product in vectors)


def activations(
    model: ModelConfig, terms: Mapping[str, TermConfig], shape: Shape, kernel: Kernel
) -> list[Activations]:
    """Return what one microbatch saves for the backward pass, for each update group of a step. Most objectives have
    one group.
    """
    parts = Parts.of(terms)
    if parts.whole is None:
        groups = [multitask_keeps(model, parts.heads, shape, kernel)]
    else:
        groups = parts.whole.keeps(model, parts.heads, shape, kernel)
    if parts.around is None:
        return groups
    vectors = parts.around.keeps_around(model, shape, kernel)
    return [vectors + group for group in groups]


def chunk_of_logits(model: ModelConfig, terms: Mapping[str, TermConfig], shape: Shape, kernel: Kernel) -> int:
    """Return the number of logits in the largest chunk of a microbatch; 0 if no tokens are predicted."""
    scored = max(term.scored(shape) for term in terms.values())
    return min(CHUNKS["cuda" if kernel == "gpu" else "cpu"], scored * model.vocabulary)
