"""Synthetic rows: random text in real shards, a tokenizer for it, and a stream that this process computes.

They are for measurements, where only the speed of a step counts. The shards have the format of any corpus, so that
every kind of input is cut from them as in training.
"""

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import TOKENIZER, BlockTable, CorpusManifest, PairTexts, block_table
from data_service.corpus.manifest_file import save_manifest
from data_service.corpus.writer import ShardWriter
from data_service.processes import temporary_folder
from data_service.store.base import Store, digest
from data_service.stream.stream import StepLayout, Stream
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.types import Block, Tokens

HELDOUT = 0.01  # share that the manifest states; the held-out split has one block

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SENTENCE, _DOCUMENT = 24, 26  # mean tokens in a sentence, sentences in a document: English prose
_WORD_STARTS = 0.7  # share of pieces that begin a word
_BLOCKS_PER_SHARD = 16


class InProcess(Stream):
    """A stream that this process computes. It has nothing to prefetch or to close."""

    def prefetch(self, ranges: object, steps: StepLayout | None = None) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class RandomText:
    """The contents of the blocks in a synthetic corpus.

    Attributes:
        ids: ids of ordinary tokens, drawn uniformly.
        tokens: number of tokens in a block.
        pairs: the texts of an example, if every document is an example; None for running text.
        text: tokens of each such text, or of every sentence; None for sentences as long as English ones.
    """

    ids: range
    tokens: int
    pairs: PairTexts | None = None
    text: int | None = None

    def block(self, seed: int) -> Block:
        """Return the block that is drawn from `seed`."""
        rng = np.random.default_rng(seed)
        drawn = rng.integers(self.ids.start, self.ids.stop, self.tokens)
        text: Tokens = drawn.astype(np.uint16) if self.ids.stop <= 1 << 16 else drawn.astype(np.uint32)
        if self.text is None:
            sentences = _boundaries(rng, self.tokens, _SENTENCE)
            return Block(text, sentences, _boundaries(rng, len(sentences) - 1, _DOCUMENT))
        each = _DOCUMENT if self.pairs is None else self.pairs.texts
        count = self.tokens // (self.text * each) * each
        sentences = np.arange(count + 1, dtype=np.int64) * self.text
        return Block(text[: sentences[-1]], sentences, np.arange(0, count + 1, each, dtype=np.int64))


def random_tokenizer(vocabulary: int) -> Tokenizer:
    """Return a WordPiece tokenizer of `vocabulary` ids with made-up pieces, 70 % of which begin a word."""
    starts = np.random.default_rng(0).random(vocabulary) < _WORD_STARTS
    pieces = {piece: i for i, piece in enumerate(_SPECIAL)}
    pieces |= {f"{'' if starts[i] else '##'}piece{i}": i for i in range(len(_SPECIAL), vocabulary)}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    definition = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": piece} | added for i, piece in enumerate(_SPECIAL)],
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": pieces,
        },
    }
    return Tokenizer(json.dumps(definition))


def first_ordinary() -> int:
    """Return the first id of `random_tokenizer` that is not a special token."""
    return len(_SPECIAL)


def write_corpus(
    store: Store, blocks: int, text: RandomText, *, vocabulary: int, tokenizer: Tokenizer | None = None
) -> CorpusManifest:
    """Write a corpus of `blocks` random training blocks and one held-out block at the store's root.

    Without a `tokenizer`, whole words cannot be masked, and no run can be made of the corpus.
    """
    sizes: dict[str, int] = {}
    digests: dict[str, str] = {}
    train = _write_split(store, "train", range(blocks), text, sizes, digests)
    heldout = _write_split(store, "heldout", range(blocks, blocks + 1), text, sizes, digests)
    files = {} if tokenizer is None else tokenizer.save_files()
    if tokenizer is not None:
        save_tokenizer(tokenizer, store.at(TOKENIZER).uri)
    manifest = CorpusManifest(
        tokenizer_hash="0" * 64 if tokenizer is None else tokenizer.hash,
        vocab_size=vocabulary,
        heldout_fraction=HELDOUT,
        train=train,
        heldout=heldout,
        unigram=np.where(np.arange(vocabulary) < text.ids.start, 0, 1),
        shard_sizes=sizes,
        shard_digests=digests,
        counts={},
        options={"rules": 2},
        tokenizer_files={f"{TOKENIZER}/{name}": digest(content) for name, content in files.items()},
        pairs=text.pairs,
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
