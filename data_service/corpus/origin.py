"""The origin of a corpus's text: its sources, how it was prepared, and for which evaluation texts it was searched.

The build stores the origin in the manifest. It copies the statistics of inputs that `corpus prepare` made, and counts
the documents with provenance by source, licence and language.
"""

from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from data_service.corpus.provenance import Provenance, ProvenanceField
from data_service.formats import StrictRecord

COUNTED_FIELDS: tuple[ProvenanceField, ...] = ("source", "licence", "language")  # counted by value in `Origin.values`
OTHER_VALUES_LABEL = "(others)"  # stands for all values after the first `MAX_VALUES`
MAX_VALUES = 1000  # largest number of values of a field that are counted by name; rarer ones are summed


class StageCounts(StrictRecord):
    """The numbers of documents that one stage of `corpus prepare` read, changed and dropped.

    Attributes:
        stage: label of the stage.
        entered, left: number of documents before and after the stage.
        changed: number of documents whose text the stage changed.
        dropped: number of documents that it dropped, by reason.
        cut: number of documents that it shortened, by reason.
        clustered: number of documents that it kept in clusters of near duplicates.
        paragraphs_cut, characters_cut: number of frequent lines or paragraphs that it cut out, and of their characters.
    """

    stage: str
    entered: int
    left: int
    changed: int
    dropped: dict[str, int]
    cut: dict[str, int] = Field(default={}, exclude_if=lambda cut: not cut)
    clustered: int = Field(default=0, exclude_if=lambda clustered: not clustered)
    paragraphs_cut: int = Field(default=0, exclude_if=lambda count: not count)
    characters_cut: int = Field(default=0, exclude_if=lambda count: not count)


class IndexedSplit(StrictRecord):
    """A split of an evaluation task. Prepared documents were searched for its texts.

    Attributes:
        split: task and split, such as `sst2/dev`.
        texts: number of different texts.
        looked_up: number of these texts that were looked for; the others are too short or too common.
        digest: blake2b hash (16 bytes, hex) of the texts.
    """

    split: str
    texts: int
    looked_up: int
    digest: str


class PreparedSource(StrictRecord):
    """A source read by `corpus prepare`. `files`: files, folders and globs; `documents`: number of documents kept."""

    files: list[str]
    documents: int


class PreparedInput(StrictRecord):
    """An output of `corpus prepare` from which a corpus was built.

    Attributes:
        uri: URI of the output.
        digest: sha256 (hex) of its `statistics.json`.
        files, all_files: number of the output's files that the corpus was built from, and of all its files.
        documents_read, documents_kept: number of documents that the preparation read and kept.
        sources: sources of the preparation, by name.
        stages: counts of each stage, in order.
        settings: settings of each stage but the first, `read`.
        searched: evaluation splits whose texts no kept document contains.
    """

    uri: str
    digest: str
    files: int
    all_files: int
    documents_read: int
    documents_kept: int
    sources: dict[str, PreparedSource]
    stages: list[StageCounts]
    settings: list[dict[str, object]]
    searched: list[IndexedSplit] = Field(default_factory=list)


ValueCounts = dict[ProvenanceField, dict[str, tuple[int, int]]]
"""(Number of documents, number of tokens) by provenance field, then by the field's value."""


class Origin(StrictRecord):
    """The origin of a corpus's text.

    Attributes:
        values: numbers of training documents and tokens by source, licence and language; "" counts documents without a
            value. Empty in a corpus without provenance.
        prepared: outputs of `corpus prepare` among the inputs.
        unprepared: number of input files that are not such outputs.
    """

    values: ValueCounts = Field(default_factory=dict)
    prepared: list[PreparedInput] = Field(default_factory=list)
    unprepared: int = 0

    @property
    def searched_splits(self) -> list[IndexedSplit]:
        """The splits of evaluation tasks whose texts were looked for in every document."""
        if self.unprepared or not self.prepared:
            return []
        first, *others = (one.searched for one in self.prepared)
        return [split for split in first if all(split in other for other in others)]


def by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return (name, count) pairs, the largest count first; pairs of equal count are ordered by name."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


class ValueCounter:
    """Counts documents by source, licence and language."""

    def __init__(self) -> None:
        self._counts: ValueCounts = {}

    def add(self, provenance: Provenance, tokens: int) -> None:
        """Count a document of `tokens` tokens."""
        for field in COUNTED_FIELDS:
            value = getattr(provenance, field) or ""
            of_field = self._counts.setdefault(field, {})
            documents, before = of_field.get(value, (0, 0))
            of_field[value] = documents + 1, before + tokens

    def counts(self) -> ValueCounts:
        """Return the counts, without fields that no document has."""
        return join_value_counts([self._counts])


def join_value_counts(parts: Iterable[Mapping[ProvenanceField, Mapping[str, Sequence[int]]]]) -> ValueCounts:
    """Add counts up. For each field, all but the `MAX_VALUES` values with most tokens become `OTHER_VALUES_LABEL`."""
    sums: dict[ProvenanceField, dict[str, list[int]]] = {field: {} for field in COUNTED_FIELDS}
    for part in parts:
        for field, values in part.items():
            for value, (documents, tokens) in values.items():
                there = sums[field].setdefault(value, [0, 0])
                there[0] += documents
                there[1] += tokens
    return {field: _merge_rare_values(values) for field, values in sums.items() if values.keys() - {""}}


def _merge_rare_values(values: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    ordered = sorted(values.items(), key=lambda item: (item[0] == OTHER_VALUES_LABEL, -item[1][1], item[0]))
    rest = [sum(column) for column in zip(*(counts for _, counts in ordered[MAX_VALUES:]), strict=True)]
    most = {value: (counts[0], counts[1]) for value, counts in ordered[:MAX_VALUES]}
    return most | ({OTHER_VALUES_LABEL: (rest[0], rest[1])} if rest else {})
