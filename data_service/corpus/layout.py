"""Keys below the corpus root. Everything under `build/` is scaffolding that a finished build takes down."""

from dataclasses import dataclass

from data_service.store.base import Store
from data_service.store.open import open_store

BUILD = "build/"
CONFIGURATION = "build/configuration.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class BuildLayout:
    """Where the tasks of one build find and leave things; travels with them to the workers.

    Attributes:
        output: URI of the corpus.
        build: hash of the configuration. Scaffolding lies below it, so that what a task of an abandoned build
            leaves behind late is never taken for ours.
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

    def receipt(self, stage: str, task: int) -> str:
        """What says that a task of a stage is finished."""
        return f"{BUILD}{self.build}/receipts/{stage}/{task:06d}.json"


def shard_name(split: int) -> str:
    """What a split's shards, and the keys of their samples, begin with."""
    return f"{split:06d}"


def shard_key(part: str, split: int) -> str:
    """The shard of a split that goes to `part`: train or heldout."""
    return f"{part}/{shard_name(split)}.tar"
