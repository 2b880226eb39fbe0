"""The corpora that a recipe names: those of its sources, and those that phases read in their place (`corpora`).

A corpus that takes the place of another has grown from it: it holds the other's documents first, under the same
numbers. So a document keeps its name, such as `news:12`, through all phases.
"""

import re

from launcher.runtime.recipe.schema import CorpusSource, Recipe

_PHASE_PREFIX = re.compile(r"phases\.(\d+)\.corpora\.")


def corpus_name(recipe: Recipe, phase: int, source: str) -> str:
    """Return the name of the corpus that a phase reads as `source`: the source's, or `phases.N.corpora.NAME`."""
    own = recipe.phases[phase].corpora or {}
    return f"phases.{phase}.corpora.{source}" if source in own else source


def corpora_by_name(recipe: Recipe) -> dict[str, CorpusSource]:
    """Return all corpora by name, those of the sources first."""
    grown = {
        corpus_name(recipe, number, source): recipe.corpus.sources[source].model_copy(update={"uri": uri})
        for number, phase in enumerate(recipe.phases)
        for source, uri in (phase.corpora or {}).items()
    }
    return {**recipe.corpus.sources, **grown}


def corpus_source(corpus: str) -> str:
    """Return the name of the source that the corpus of this name is, or replaces."""
    return _PHASE_PREFIX.sub("", corpus, count=1)


def corpus_phase(corpus: str) -> int | None:
    """Return the phase that names a corpus of its own; None for the corpus of a source."""
    found = _PHASE_PREFIX.match(corpus)
    return None if found is None else int(found[1])


def corpus_key(corpus: str) -> str:
    """Return the path in the recipe of the corpus of this name."""
    return corpus if _PHASE_PREFIX.match(corpus) else f"corpus.sources.{corpus}"
