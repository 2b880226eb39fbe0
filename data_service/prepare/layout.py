"""The keys of a preparation: its results, and what it needs only until it is done (below `build/`); and what the tasks
that compare documents have in common.
"""

from dataclasses import dataclass

from data_service.corpus.manifest import BUILD_FOLDER, BuildLayout
from data_service.ingest.file_kinds import PREPARED_DOCUMENTS_PREFIX
from data_service.ingest.tasks import BuildTask

DROPPED_PREFIX, PARAGRAPHS_PREFIX = "dropped/", "paragraphs/"


@dataclass(frozen=True)
class PrepareLayout(BuildLayout):
    """The keys that the tasks of one preparation read and write. A pass ends before a stage that compares documents."""

    def kept_key(self, chunk: int) -> str:
        """Return the key of the documents of a chunk that are kept in the end."""
        return f"{PREPARED_DOCUMENTS_PREFIX}{chunk:06d}.parquet"

    def dropped_key(self, chunk: int, pass_number: int) -> str:
        """Return the key of the documents of a chunk that pass `pass_number` dropped."""
        return f"{DROPPED_PREFIX}{chunk:06d}-{pass_number}.parquet"

    def between_passes_key(self, chunk: int, pass_number: int) -> str:
        """Return the key of the documents of a chunk that pass `pass_number` hands on."""
        return f"{BUILD_FOLDER}{self.build}/documents/{pass_number}/{chunk:06d}.parquet"

    def hashes_of_kind_key(self, kind: str, chunk: int) -> str:
        """Return the key of the sorted hashes of a chunk: of its `ids`, or of its texts before pass `kind`."""
        return f"{BUILD_FOLDER}{self.build}/hashed/{kind}/{chunk:06d}.bin"

    def clusters_key(self, kind: str, partition: int) -> str:
        """Return the key of what comparing one partition of hashes found."""
        return f"{BUILD_FOLDER}{self.build}/clusters/{kind}/{partition:03d}.arrows"

    def frequent_paragraphs_key(self, kind: str, partition: int) -> str:
        """Return the key of the hashes of frequent paragraphs in one partition."""
        return f"{BUILD_FOLDER}{self.build}/frequent/{kind}/{partition:06d}.bin"

    def listed_paragraphs_key(self, pass_number: int) -> str:
        """Return the key of the table of the most frequent paragraphs that were cut before pass `pass_number`."""
        return f"{PARAGRAPHS_PREFIX}{pass_number}.parquet"

    def pairs_key(self, kind: str, task: int) -> str:
        """Return the key of the pairs of near duplicates that one task found."""
        return f"{BUILD_FOLDER}{self.build}/pairs/{kind}/{task:06d}.bin"

    def members_key(self, kind: str, part: int) -> str:
        """Return the key of one part of the members of clusters of near duplicates."""
        return f"{BUILD_FOLDER}{self.build}/members/{kind}/{part:06d}.bin"


@dataclass(frozen=True)
class ComparingTask(BuildTask):
    """A task that compares documents of all chunks. `kind`: what is compared, as in the keys."""

    layout: PrepareLayout
    kind: str

    @property
    def receipt_key(self) -> str:
        return self.layout.receipt_key(f"{self.stage}-{self.kind}", self.index)


@dataclass(frozen=True)
class StoredChunk:
    """What is compared of a chunk, stored as one object. `digest`: digest of its bytes; `size`: number of bytes, 0 if
    there is no object."""

    key: str
    digest: str
    size: int

    def object_sizes(self) -> dict[str, int]:
        """Return the size of the stored object, by key."""
        return {self.key: self.size} if self.size else {}
