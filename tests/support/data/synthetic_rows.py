"""Synthetic rows for measurements: random text in real shards, and a stream that this process computes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import BlockTable, CorpusManifest, block_table
from data_service.corpus.manifest_file import save_manifest
from data_service.corpus.writer import ShardWriter
from data_service.processes import temporary_folder
from data_service.store.base import Store
from data_service.stream.stream import StepStart, Stream
from data_service.types import Block, Tokens

HELDOUT = 0.01  # share that the manifest states; the held-out split has one block

_SENTENCE, _DOCUMENT = 24, 26  # mean tokens in a sentence, sentences in a document: English prose
_BLOCKS_PER_SHARD = 16


class InProcess(Stream):
    """A stream that this process computes. It has nothing to prefetch or to close."""

    def prefetch(self, ranges: object, steps: StepStart | None = None) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class RandomText:
    """The contents of the blocks in a synthetic corpus.

    Attributes:
        ids: ids of ordinary tokens, drawn uniformly.
        tokens: number of tokens in a block.
    """

    ids: range
    tokens: int

    def block(self, seed: int) -> Block:
        """Return the block that is drawn from `seed`."""
        rng = np.random.default_rng(seed)
        drawn = rng.integers(self.ids.start, self.ids.stop, self.tokens)
        text: Tokens = drawn.astype(np.uint16) if self.ids.stop <= 1 << 16 else drawn.astype(np.uint32)
        sentences = _boundaries(rng, self.tokens, _SENTENCE)
        return Block(text, sentences, _boundaries(rng, len(sentences) - 1, _DOCUMENT))


def write_corpus(store: Store, blocks: int, text: RandomText, *, vocabulary: int) -> CorpusManifest:
    """Write `blocks` random training blocks and a held-out one as a corpus at the store's root, without a tokenizer."""
    sizes: dict[str, int] = {}
    digests: dict[str, str] = {}
    train = _write_split(store, "train", range(blocks), text, sizes, digests)
    heldout = _write_split(store, "heldout", range(blocks, blocks + 1), text, sizes, digests)
    manifest = CorpusManifest(
        tokenizer_hash="0" * 64,
        vocab_size=vocabulary,
        heldout_fraction=HELDOUT,
        train=train,
        heldout=heldout,
        unigram=np.where(np.arange(vocabulary) < text.ids.start, 0, 1),
        shard_sizes=sizes,
        shard_digests=digests,
        counts={},
        options={"rules": 2},
    )
    save_manifest(store, manifest)
    return manifest


def _write_split(
    store: Store, split: str, seeds: range, text: RandomText, sizes: dict[str, int], digests: dict[str, str]
) -> BlockTable:
    """Write a split's shards and return the table of its blocks. The shards' sizes and digests are added to `sizes`
    and `digests`.
    """
    rows: list[tuple[int, int, int, int, int, int]] = []
    block_digests: list[str] = []
    shards: list[str] = []
    with temporary_folder("synthetic") as folder:
        for first in range(0, len(seeds), _BLOCKS_PER_SHARD):
            path, key = folder / "shard.tar", f"{split}/{len(shards):06d}.tar"
            writer = ShardWriter(path, f"{len(shards):06d}")
            for seed in seeds[first : first + _BLOCKS_PER_SHARD]:
                writer.write(text.block(seed))
            written = writer.finish()
            store.put_file(key, path)
            rows += [
                (len(shards), b.offset, b.length, b.tokens, b.sentences, b.documents) for b in written.blocks
            ]
            block_digests += [b.digest for b in written.blocks]
            sizes[key], digests[key] = written.size, written.digest
            shards.append(key)
    return block_table(rows, block_digests, shards)


def _boundaries(rng: np.random.Generator, end: int, mean: float) -> NDArray[np.int64]:
    """Return random boundaries from 0 to `end` whose distances have the mean `mean`."""
    cuts = np.cumsum(rng.geometric(1 / mean, size=round(2 * end / mean) + 100))
    return np.concatenate([[0], cuts[cuts < end], [end]]).astype(np.int64)
