"""What a corpus states of its text: where it is from, how it was prepared, which evaluation sets it was searched for.

A part of the manifest, made from the inputs of the build: of outputs of `corpus prepare` it holds what their statistics
say, of documents with provenance how many there are of each source, licence and language.
"""

from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from data_service.corpus.provenance import Provenance, ProvenanceField
from data_service.formats import StrictRecord

COUNTED_FIELDS: tuple[ProvenanceField, ...] = ("source", "licence", "language")
OTHER_VALUES_LABEL = "(others)"
MAX_VALUES = 1000  # values of a field that are counted by name; the rest is counted together


class StageCounts(StrictRecord):
    """What a stage of a preparation did.

    Attributes:
        stage: its label.
        entered, left: number of documents.
        changed: number whose text it changed.
        dropped: number that it left out, by reason.
        cut: number of which it removed a part, by reason.
        clustered: number that it kept in clusters of near duplicates.
        paragraphs_cut, characters_cut: numbers of lines or paragraphs, and of characters, that were cut as frequent.
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
    """A split of a task whose texts are in an index of evaluation texts.

    Attributes:
        split: task and split, such as `sst2/dev`.
        texts: number of different texts.
        looked_up: number of those that documents are searched for.
        digest: blake2b hash (16 bytes, hex) of the texts.
    """

    split: str
    texts: int
    looked_up: int
    digest: str


class PreparedSource(StrictRecord):
    """A source of a preparation. `files`: files, folders and globs; `documents`: number that were kept."""

    files: list[str]
    documents: int


class PreparedInput(StrictRecord):
    """An output of `corpus prepare` from which a corpus was built.

    Attributes:
        uri: its place.
        digest: sha256 (hex) of its `statistics.json`.
        files, all_files: number of its files that the corpus was built from, and of all.
        documents_read, documents_kept: number of documents that the preparation read and kept.
        sources: its sources, by name.
        stages: what each stage did, in order.
        settings: settings of each stage but the first, `read`.
        searched: splits of tasks whose texts no kept document holds.
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
"""Numbers of documents and of tokens by value, for each of the fields in `COUNTED_FIELDS` that is recorded."""


class Origin(StrictRecord):
    """Where the text of a corpus comes from.

    Attributes:
        values: of the training text, documents and tokens by source, licence and language; "" for documents that lack
            it. Empty without provenance.
        prepared: outputs of `corpus prepare` among the inputs.
        unprepared: number of other input files.
    """

    values: ValueCounts = Field(default_factory=dict)
    prepared: list[PreparedInput] = Field(default_factory=list)
    unprepared: int = 0

    @property
    def searched_splits(self) -> list[IndexedSplit]:
        """The splits that the whole text was searched for."""
        if self.unprepared or not self.prepared:
            return []
        first, *others = (one.searched for one in self.prepared)
        return [split for split in first if all(split in other for other in others)]


def by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return names and their counts, the largest first; of equal counts by name."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


class ValueCounter:
    """Counts documents by source, licence and language."""

    def __init__(self) -> None:
        self._counts: ValueCounts = {}

    def add(self, provenance: Provenance, tokens: int) -> None:
        """Count a document of so many tokens."""
        for field in COUNTED_FIELDS:
            value = getattr(provenance, field) or ""
            of_field = self._counts.setdefault(field, {})
            documents, before = of_field.get(value, (0, 0))
            of_field[value] = documents + 1, before + tokens

    def counts(self) -> ValueCounts:
        """Return the counts without fields of which nothing is recorded."""
        return join_value_counts([self._counts])


def join_value_counts(parts: Iterable[Mapping[ProvenanceField, Mapping[str, Sequence[int]]]]) -> ValueCounts:
    """Return the sums of counts: of each field the values with most tokens by name, the rest together."""
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
