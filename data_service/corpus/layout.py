"""Keys below the corpus root. Everything under `build/` is needed only while a corpus is built, and deleted
at the end.
"""

from dataclasses import dataclass

from data_service.store.base import Store
from data_service.store.open import open_store

BUILD = "build/"
CONFIGURATION = "build/configuration.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class BuildLayout:
    """The keys that the tasks of one build read and write. It is sent to the workers with each task.

    Attributes:
        output: URI of the corpus.
        build: hash of the configuration. Keys under `build/` contain it, so that what a late task of an abandoned build
            writes is never taken for ours.
    """

    output: str
    build: str

    def open(self) -> Store:
        """The store at the corpus root."""
        return open_store(self.output)

    def hashes(self, split: int) -> str:
        """The document hashes of a split, sorted."""
        return f"{BUILD}{self.build}/hashes/{split:06d}.bin"

    def drops(self, partition: int) -> str:
        """The numbers of the later copies among the documents whose hashes fall in one partition."""
        return f"{BUILD}{self.build}/drops/{partition:03d}.bin"

    def unigram(self, split: int) -> str:
        """Token counts of a split's training shard: [vocab_size] int64."""
        return f"{BUILD}{self.build}/unigrams/{split:06d}.bin"

    def words(self, name: str) -> str:
        """A copy of one of the files of words, for the workers."""
        return f"{BUILD}{self.build}/words/{name}"

    def receipt(self, stage: str, task: int) -> str:
        """The receipt of a finished task."""
        return f"{BUILD}{self.build}/receipts/{stage}/{task:06d}.json"


def shard_name(split: int) -> str:
    """The beginning of the names of a split's shards, and of the keys of their samples."""
    return f"{split:06d}"


def shard_key(part: str, split: int) -> str:
    """The shard of a split that goes to `part`: train or heldout."""
    return f"{part}/{shard_name(split)}.tar"
