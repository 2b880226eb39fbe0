"""Keys below the corpus root. Everything under `build/` is scaffolding that a finished build takes down."""

CONFIGURATION = "build/configuration.json"
BUILD = "build/"
TOKENIZER = "tokenizer"


def hashes_key(split: int) -> str:
    """The document hashes of a split, sorted."""
    return f"build/hashes/{split:06d}.bin"


def drops_key(partition: int) -> str:
    """The later copies of the documents whose hashes fall in one partition."""
    return f"build/drops/{partition:03d}.bin"


def scan_receipt(split: int) -> str:
    """Written once the hashes of a split are."""
    return f"build/scanned/{split:06d}.json"


def drops_receipt(partition: int) -> str:
    """Written once the drops of a partition are."""
    return f"build/compared/{partition:03d}.json"


def shards_receipt(split: int) -> str:
    """Written once the shards of a split are."""
    return f"build/written/{split:06d}.json"


def unigram_key(split: int) -> str:
    """Token counts of a split's training shard: [vocab_size] int64."""
    return f"build/unigrams/{split:06d}.bin"


def shard_name(split: int) -> str:
    """What a split's shards and the keys of their samples begin with."""
    return f"{split:06d}"


def shard_key(part: str, split: int) -> str:
    """The shard of a split that goes to `part`: train or heldout."""
    return f"{part}/{shard_name(split)}.tar"
