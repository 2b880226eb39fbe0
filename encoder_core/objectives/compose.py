"""Combines the terms of an objective: checks them, counts their parameters, and builds the module that trains them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import ModelConfig
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.term import HeadConfig, ModuleConfig, Refusal, TermConfig, TermSetting
from encoder_core.objectives.weights import network_weight_count

if TYPE_CHECKING:  # torch is imported only where modules are built, not to read a recipe
    from encoder_core.objectives.modules.losses import ObjectiveModule


def refusals(setting: TermSetting) -> list[Refusal]:
    """Return all reasons why the terms of `setting` cannot be trained, without duplicates."""
    found = [refusal for term in setting.terms.values() for refusal in term.refusals(setting)]
    whole = [
        name
        for name, term in setting.terms.items()
        if isinstance(term, ModuleConfig) and not isinstance(term, ContrastiveConfig)
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
class ObjectiveParts:
    """The terms of an objective, by what they build.

    Attributes:
        heads: terms that add a head to a network.
        whole: the term that builds the whole module; None: the heads' network is the module.
        around: the contrastive term, which wraps the module; None without it.
    """

    heads: Sequence[HeadConfig]
    whole: ModuleConfig | None
    around: ContrastiveConfig | None

    @classmethod
    def from_terms(cls, terms: Mapping[str, TermConfig]) -> "ObjectiveParts":
        """Sort the terms. `contrastive` wraps the others' module; if it is the only term, it builds the module."""
        around = next((term for term in terms.values() if isinstance(term, ContrastiveConfig)), None)
        if around is not None and len(terms) == 1:
            return cls((), around, None)
        heads = [term for term in terms.values() if isinstance(term, HeadConfig)]
        others = (t for t in terms.values() if isinstance(t, ModuleConfig) and t is not around)
        return cls(heads, next(others, None), around)


def weight_count(model: ModelConfig, terms: Mapping[str, TermConfig]) -> int:
    """Return the number of parameters of the module that `compose` builds. Tied parameters count once.

    Raises:
        ModelError: the size of the vocabulary is unknown.
    """
    parts = ObjectiveParts.from_terms(terms)
    added = 0 if parts.around is None else parts.around.added_weight_count(model)
    if parts.whole is None:
        return added + network_weight_count(model, parts.heads)
    return added + parts.whole.weight_count(model, parts.heads)


def compose(model: ModelConfig, terms: Mapping[str, TermConfig]) -> "ObjectiveModule":
    """Build the module that trains `terms` (by name) on a model of any family, on the default device. Weights are not
    yet initialised.

    Raises:
        ModelError: the terms cannot be combined or do not suit this family, or the size of the vocabulary is unknown.
    """
    from encoder_core.objectives.modules.multitask import multitask_model

    for refusal in refusals(TermSetting(model, terms)):
        raise ModelError(refusal.what, remedy=refusal.remedy)
    parts = ObjectiveParts.from_terms(terms)
    if parts.whole is None:
        module: ObjectiveModule = multitask_model(model, parts.heads)
    else:
        module = parts.whole.build(model, parts.heads)
    return module if parts.around is None else parts.around.wrap(module, model)
