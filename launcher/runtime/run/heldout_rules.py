"""Held-out text of one source must not be training text of another. Sources with one held-out rule keep it apart.
Where the rules differ, the texts are compared before a run is made.
"""

from collections.abc import Callable
from datetime import datetime
from itertools import permutations

from data_service.corpus.corpus import open_corpus
from data_service.corpus.manifest import HeldoutRule
from data_service.corpus.manifest_file import load_manifest
from data_service.errors import CorpusError
from data_service.ingest.heldout_overlap import Overlap, find_overlap, rules_exclude_overlap
from data_service.store.base import Store
from data_service.store.open import open_store
from launcher.runtime.recipe.corpora import corpora_by_name, corpus_key
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.log import operator_event

MAX_OVERLAP_SHARE = 0.01
"""Share of a source's held-out tokens that may be training text of another: texts that occur everywhere."""
ReportBlocks = Callable[[int, int], None]


def differing_rules(recipe: Recipe) -> list[tuple[str, str]]:
    """Return pairs of sources (held out, trained on) whose rules do not say that held-out text of the first is not
    training text of the second.

    Raises:
        CorpusError, StoreError: a corpus cannot be read.
    """
    corpora = corpora_by_name(recipe)
    if len(corpora) < 2:
        return []
    manifests = {name: load_manifest(open_store(source.uri)) for name, source in corpora.items()}
    return [
        (one, other)
        for one, other in permutations(manifests, 2)
        if not rules_exclude_overlap(manifests[one], manifests[other])
    ]


def refuse_leaks(recipe: Recipe, report: ReportBlocks = lambda more, total: None) -> list[str]:
    """Compare the sources whose held-out rules differ; return a line on each pair that was compared.

    `report` is called with the number of blocks just read, and of all of the pair.

    Raises:
        CorpusError: more than `MAX_OVERLAP_SHARE` of a source's held-out text is training text of another.
        CorruptBlock, StoreError: a corpus cannot be read.
    """
    lines, corpora = list[str](), corpora_by_name(recipe)
    for one, other in differing_rules(recipe):
        held, trained = (open_corpus(corpora[name].uri) for name in (one, other))
        found = find_overlap(held, trained, report)
        if found.share > MAX_OVERLAP_SHARE:
            raise _leak_error(recipe, one, other, found)
        lines.append(
            f"held out of {one}, trained on in {other}: {found.found:,} of {found.documents:,} documents"
        )
    return lines


def _leak_error(recipe: Recipe, one: str, other: str, found: Overlap) -> CorpusError:
    uris = [corpora_by_name(recipe)[name].uri for name in (one, other)]
    rules = [load_manifest(open_store(uri)).rule for uri in uris]
    return CorpusError(
        f"{corpus_key(other)} ({uris[1]}) trains on {found.found:,} of {found.documents:,} documents that "
        f"{corpus_key(one)} ({uris[0]}) holds out, {found.share:.1%} of its held-out tokens; the first is "
        f"heldout:{found.first}. Their rules differ: {_rule_text(rules[0])} and {_rule_text(rules[1])}",
        remedy=f"build one of them again with --heldout-like the other ({uris[0]} holds out more), or leave out of "
        f"{uris[1]} what both have: `corpus prepare` finds it if it gets the text of both",
    )


def _rule_text(rule: HeldoutRule) -> str:
    of = "" if not rule.clusters else f" of clusters {rule.clusters[:12]}"
    what = "documents" if rule.unit == "document" else f"stretches of {rule.length:,} bytes"
    return f"{what}{of} with hashes below {rule.below / 2**64:.4%}"


def record_compared(store: Store, lines: list[str], now: datetime) -> None:
    """Record among the events of a new run what was compared, if anything was."""
    if lines:
        operator_event(store, "heldout_rules", now.timestamp(), compared=True, what="; ".join(lines))
