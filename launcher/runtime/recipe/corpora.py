"""The corpora that a recipe names: one for each source, and those that phases read in place of a source's (`corpora`).

A phase's corpus extends the one that it replaces: it begins with the same documents, under the same numbers. So a
document keeps its name, such as `news:12`, in all phases.
"""

import re

from launcher.runtime.recipe.schema import CorpusSource, Recipe

_PHASE_PREFIX = re.compile(r"phases\.(\d+)\.corpora\.")  # beginning of the name of a phase's corpus


def corpus_name(recipe: Recipe, phase: int, source: str) -> str:
    """Return the name of the corpus that a phase reads for `source`: `source`, or `phases.N.corpora.SOURCE`."""
    own = recipe.phases[phase].corpora or {}
    return f"phases.{phase}.corpora.{source}" if source in own else source


def corpora_by_name(recipe: Recipe) -> dict[str, CorpusSource]:
    """Return all corpora by name: the sources' own first, then those of phases."""
    grown = {
        corpus_name(recipe, number, source): recipe.corpus.sources[source].model_copy(update={"uri": uri})
        for number, phase in enumerate(recipe.phases)
        for source, uri in (phase.corpora or {}).items()
    }
    return {**recipe.corpus.sources, **grown}


def corpus_source(corpus: str) -> str:
    """Return the source for which a corpus of this name is read."""
    return _PHASE_PREFIX.sub("", corpus, count=1)


def corpus_phase(corpus: str) -> int | None:
    """Return the number of the phase that names this corpus; None for a source's own corpus."""
    found = _PHASE_PREFIX.match(corpus)
    return None if found is None else int(found[1])


def corpus_key(corpus: str) -> str:
    """Return the recipe key, as a dotted path, that names this corpus."""
    return corpus if _PHASE_PREFIX.match(corpus) else f"corpus.sources.{corpus}"
