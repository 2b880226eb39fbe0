"""The terms of an objective together: why they cannot be combined, and what they build."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from encoder_core.terms.term import (
    AroundConfig,
    HeadConfig,
    ModuleConfig,
    Reads,
    Refusal,
    Setting,
    TermConfig,
)


def needs_all_tokens(reading: Iterable[Reads], *, has_decoder: bool) -> bool:
    """Return whether the last layer runs for all tokens.

    It does if a term reads all of them, or if two terms read its output. Targets that DeBERTa's mask decoder predicts
    do not read its output.
    """
    output = [reads for reads in reading if not (has_decoder and reads == "targets")]
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
class ObjectiveParts:
    """The terms of an objective by what they build: heads of one network, the whole module, or what is around it."""

    heads: Sequence[HeadConfig]
    whole: ModuleConfig | None
    around: AroundConfig | None

    @classmethod
    def from_terms(cls, terms: Mapping[str, TermConfig]) -> "ObjectiveParts":
        """Sort the terms. A term that can be around others is the whole module if it is the only one."""
        around = next((term for term in terms.values() if isinstance(term, AroundConfig)), None)
        if around is not None and len(terms) == 1:
            return cls((), around, None)
        heads = [term for term in terms.values() if isinstance(term, HeadConfig)]
        others = (t for t in terms.values() if isinstance(t, ModuleConfig) and t is not around)
        return cls(heads, next(others, None), around)
