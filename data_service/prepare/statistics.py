"""Statistics of a preparation: the content of `statistics.json`, which is written last and completes the output."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from pydantic import Field

from data_service.corpus.manifest import StoredFile
from data_service.corpus.origin import MAX_VALUES, OTHER_VALUES_LABEL, IndexedSplit, StageCounts, by_count
from data_service.formats import StrictRecord
from data_service.prepare.passes import PassReceipt
from data_service.store.base import Store

FORMAT_VERSION = 1  # version of the format of `statistics.json`


class SourceCounts(StrictRecord):
    """Counts of a source's documents. `odd`: documents that do not look like text; `dropped`: by stage and reason."""

    documents_read: int
    documents_kept: int
    text_bytes_read: int
    text_bytes_kept: int
    odd: int
    dropped: dict[str, dict[str, int]]


class Statistics(StrictRecord):
    """The statistics of a complete preparation.

    Attributes:
        format: version of this format.
        preparation: settings and inputs, as `configuration.describe_identity` returns them, and hashes of the documents
            read.
        documents_read, documents_kept: numbers of documents; all others were dropped, each for one reason.
        stages: counts of each stage, in order; the first is `read`.
        sources: counts of each source, by its name.
        languages, licences: number of kept documents, by value; "" for an unknown value.
        lengths_read, lengths_kept: number of documents with text, by number of characters, rounded down to a power of
            two. Empty in outputs of older versions.
        parts: the stored files of the output, by key.
        searched: evaluation splits whose indexed texts no kept document contains.
    """

    format: int = FORMAT_VERSION
    preparation: dict[str, object]
    documents_read: int
    documents_kept: int
    text_bytes_read: int
    text_bytes_kept: int
    stages: list[StageCounts]
    sources: dict[str, SourceCounts]
    languages: dict[str, int]
    licences: dict[str, int]
    lengths_read: dict[int, int] = Field(default_factory=dict)
    lengths_kept: dict[int, int] = Field(default_factory=dict)
    parts: dict[str, StoredFile]
    searched: list[IndexedSplit] = Field(default_factory=list)


def gather_statistics(
    configuration: dict[str, object],
    labels: Sequence[str],
    sources: Sequence[str],
    passes: Sequence[Sequence[PassReceipt]],
    searched: Sequence[IndexedSplit],
    tables: Mapping[str, StoredFile],
) -> Statistics:
    """Return the statistics of all passes.

    `labels`: labels of the stages, in order; `sources`: source of each chunk; `passes`: receipts by pass and chunk;
    `searched`: evaluation splits that were searched for; `tables`: further files of the output, by key.
    """
    by_source = {
        name: _source_counts([[p[i] for i, s in enumerate(sources) if s == name] for p in passes])
        for name in dict.fromkeys(sources)
    }
    receipts = list(chain.from_iterable(passes))
    stages = _stage_counts(labels, by_source, receipts)
    parts = {
        key: StoredFile(receipt.files[key], found) for receipt in receipts for key, found in receipt.parts.items()
    } | dict(tables)
    return Statistics(
        preparation=configuration,
        documents_read=sum(counts.documents_read for counts in by_source.values()),
        documents_kept=sum(counts.documents_kept for counts in by_source.values()),
        text_bytes_read=sum(counts.text_bytes_read for counts in by_source.values()),
        text_bytes_kept=sum(counts.text_bytes_kept for counts in by_source.values()),
        stages=stages,
        sources=by_source,
        languages=_most_frequent(receipt.counts.languages for receipt in passes[-1]),
        licences=_most_frequent(receipt.counts.licences for receipt in passes[-1]),
        lengths_read=_sum_counts(receipt.counts.lengths_read for receipt in passes[0]),
        lengths_kept=_sum_counts(receipt.counts.lengths_left for receipt in passes[-1]),
        parts=dict(sorted(parts.items())),
        searched=list(searched),
    )


def _stage_counts(
    labels: Sequence[str], by_source: Mapping[str, SourceCounts], receipts: Sequence[PassReceipt]
) -> list[StageCounts]:
    entered = sum(source.documents_read for source in by_source.values())
    counts, stages = [receipt.counts for receipt in receipts], list[StageCounts]()
    for label in labels:
        dropped = _sum_counts(source.dropped.get(label, {}) for source in by_source.values())
        stages.append(
            StageCounts(
                stage=label,
                entered=entered,
                left=entered - sum(dropped.values()),
                changed=sum(one.changed[label] for one in counts),
                dropped=dropped,
                cut=_sum_counts(one.cut[label] for one in counts),
                clustered=sum(one.clustered[label] for one in counts),
                paragraphs_cut=sum(one.paragraphs_cut[label] for one in counts),
                characters_cut=sum(one.characters_cut[label] for one in counts),
            )
        )
        entered = stages[-1].left
    return stages


def _source_counts(passes: Sequence[Sequence[PassReceipt]]) -> SourceCounts:
    """Return the counts of one source. `passes`: receipts of its chunks, by pass."""
    first = [receipt.counts for receipt in passes[0]]
    last = [receipt.counts for receipt in passes[-1]]
    dropped = defaultdict[str, Counter[str]](Counter)
    for receipt in chain.from_iterable(passes):
        for stage, reasons in receipt.counts.dropped.items():
            dropped[stage].update(reasons)
    return SourceCounts(
        documents_read=sum(counts.entered for counts in first),
        documents_kept=sum(counts.left for counts in last),
        text_bytes_read=sum(counts.entered_bytes for counts in first),
        text_bytes_kept=sum(counts.left_bytes for counts in last),
        odd=sum(counts.odd for counts in first),
        dropped={stage: _sum_counts([dropped[stage]]) for stage in sorted(dropped)},
    )


Key = TypeVar("Key", str, int)  # what is counted: a value, a reason or a length


def _sum_counts(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    total = Counter[Key]()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items()))


def _most_frequent(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums for the most frequent values, and one sum for all others under OTHER_VALUES_LABEL."""
    ordered = by_count(_sum_counts(counts))
    rest = sum(count for _, count in ordered[MAX_VALUES:])
    return dict(ordered[:MAX_VALUES]) | ({OTHER_VALUES_LABEL: rest} if rest else {})


def save_statistics(store: Store, key: str, statistics: Statistics) -> None:
    """Store the statistics as JSON under `key`."""
    store.put(key, (json.dumps(statistics.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n").encode())
