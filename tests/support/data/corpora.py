"""Small corpora of random text: written as real shards, or as numbers alone for plans over them."""

from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from data_service.corpus.manifest import TOKENIZER_FOLDER, BlockTable, CorpusManifest, PairTexts, make_block_table
from data_service.corpus.manifest_file import save_manifest
from data_service.corpus.writer import ShardWriter, WrittenShard, concatenate_shard_tables
from data_service.samples.samples import Samples
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.stream.plan import StreamPlan
from data_service.tokenizers.specials import SpecialIds
from data_service.types import Block

VOCABULARY = 500
SPECIAL = SpecialIds(cls=0, sep=2, pad=1, mask=4, unk=3)
NEVER_MASKED = (0, 1, 2, 3, 4)


def random_block(
    seed: int, tokens: int, *, sentence: float = 12.0, document: float = 6.0, vocabulary: int = VOCABULARY
) -> Block:
    """A block of ordinary tokens; `sentence` and `document` are mean lengths, in tokens and in sentences."""
    rng = np.random.default_rng(seed)
    text = rng.integers(len(NEVER_MASKED), vocabulary, tokens).astype(np.uint16)
    sentences = _boundaries(rng, tokens, sentence)
    return Block(text, sentences, _boundaries(rng, len(sentences) - 1, document))


def block_of(documents: list[list[int]], first: int = 5) -> Block:
    """A block whose documents have sentences of these lengths; its tokens count up from `first`."""
    lengths = [length for document in documents for length in document]
    text = np.arange(first, first + sum(lengths)).astype(np.uint16)
    sentences = np.cumsum([0, *lengths])
    return Block(text, sentences, np.cumsum([0, *map(len, documents)]))


def block_of_pairs(seed: int, examples: int, texts: int, *, mean: float = 9.0) -> Block:
    """Examples of so many texts each, of ordinary tokens; `mean` is the texts' mean length."""
    rng = np.random.default_rng(seed)
    lengths = rng.geometric(1 / mean, size=examples * texts)
    tokens = rng.integers(len(NEVER_MASKED), VOCABULARY, lengths.sum()).astype(np.uint16)
    sentences = np.append(0, np.cumsum(lengths))
    return Block(tokens, sentences, np.arange(0, examples * texts + 1, texts))


def write_corpus(
    folder: Path, blocks: list[Block], heldout: list[Block] | None = None, negatives: int | None = None
) -> str:
    """Write a corpus of one shard a split, of pairs with so many negatives or of text; its URI."""
    write_into(open_store(folder), blocks, heldout or [], negatives)
    return str(folder)


def write_into(
    store: Store,
    blocks: Iterable[Block],
    heldout: Iterable[Block],
    negatives: int | None = None,
    *,
    vocabulary: int = VOCABULARY,
    shard_blocks: int | None = None,
) -> CorpusManifest:
    """Write a corpus, without a tokenizer, at the store's root: shards of `shard_blocks`, by default one a split."""
    tables, written = {}, dict[str, WrittenShard]()
    unigram = np.zeros(vocabulary, np.int64)
    for split, content in (("train", blocks), ("heldout", heldout)):
        shards = dict[str, WrittenShard]()
        rest = iter(content)
        while (chunk := list(islice(rest, shard_blocks))) or not shards:
            key = f"{split}/{len(shards):06d}.tar"
            shards[key] = _write_shard(store, key, chunk)
            if split == "train":
                unigram += sum(np.bincount(block.tokens, minlength=vocabulary) for block in chunk)
        tables[split], written = concatenate_shard_tables(shards), written | shards
    sizes = {key: shard.size for key, shard in written.items()}
    digests = {key: shard.digest for key, shard in written.items()}
    manifest = CorpusManifest(
        "0" * 64, vocabulary, 0.1, tables["train"], tables["heldout"], unigram, sizes, digests, {}, {}
    )
    if negatives is not None:
        manifest = replace(manifest, pairs=PairTexts(negatives))
    save_manifest(store, manifest)
    return manifest


def _write_shard(store: Store, key: str, blocks: list[Block]) -> WrittenShard:
    with TemporaryDirectory() as folder:
        writer = ShardWriter(Path(folder) / "shard.tar", Path(key).stem)
        for block in blocks:
            writer.write(block)
        written = writer.finish()
        store.put_file(key, Path(folder) / "shard.tar")
    return written


def write_vocabulary(uri: str, pieces: list[str] | None = None) -> None:
    """A WordPiece tokenizer where a corpus keeps its own: special pieces and these further ones; by default, one in
    three continues a word."""
    folder = Path(uri) / TOKENIZER_FOLDER
    folder.mkdir()
    further = pieces or [f"{'##' if number % 3 == 0 else ''}p{number}" for number in range(5, VOCABULARY)]
    special = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *further]) + "\n", "utf-8")


def spec_of(*sources: SourceSpec, **settings: Any) -> StreamSpec:
    """A spec over corpora of random text."""
    return StreamSpec.model_validate(
        {
            "sources": sources,
            "length": 32,
            "special": SPECIAL,
            "never_masked": NEVER_MASKED,
            "vocab_size": VOCABULARY,
            "seed": 7,
            "window": {"least_tokens": 1000},
            **settings,
        }
    )


def source_of(uri: str, name: str = "text", weight: float | None = None) -> SourceSpec:
    """The source at `uri`, as it is now."""
    from data_service.corpus.manifest_file import load_manifest

    fingerprint = load_manifest(open_store(uri)).fingerprint
    return SourceSpec(name=name, uri=uri, manifest_fingerprint=fingerprint, weight=weight)


def _boundaries(rng: np.random.Generator, end: int, mean: float) -> np.ndarray:
    lengths = rng.geometric(1 / mean, size=end)
    cuts = np.cumsum(lengths)
    return np.concatenate([[0], cuts[cuts < end], [end]]).astype(np.int64)


def table_of(rows: list[int]) -> BlockTable:
    """A table of blocks with 10 tokens a row; there is no data behind it."""
    return make_block_table([(0, 0, 0, 10 * n, n, 1) for n in rows], ["0" * 32] * len(rows), ["shard"])


def plan_of(rows: list[list[int]], weights: list[float] | None = None, **settings: Any) -> StreamPlan:
    corpora = [
        SourceSpec(name=f"s{i}", uri=f"u{i}", manifest_fingerprint=f"f{i}", weight=weights[i] if weights else None)
        for i in range(len(rows))
    ]
    spec = spec_of(*corpora, **{"window": {"samples": 7, "least_tokens": 1}, **settings})
    return StreamPlan(spec, tuple(map(table_of, rows)), tuple(np.array(counts) for counts in rows))


def rows_of_epoch(plan: StreamPlan, epoch: int) -> list[tuple[int, int, int, int]]:
    """(source, block, row, the source's epoch) of every sample, in order."""
    found = []
    for window in range(plan.epoch_layout.windows):
        made = plan.window(epoch, window)
        rows = [(p.source, p.block, row, p.epoch) for p in made.pieces for row in range(p.start, p.stop)]
        found += [rows[i] for i in made.order.items_at(np.arange(len(rows))).tolist()]
    return found


def assert_same(left: Samples, right: Samples) -> None:
    for field in fields(Samples):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        np.testing.assert_array_equal(ours, theirs)
        assert ours is None or ours.dtype == theirs.dtype


def written_out(number: int) -> Block:
    """A block by formula, so that no library's random numbers are in it."""
    sentences = np.cumsum([0, *(1 + (i * i + number) % 37 for i in range(90))])
    tokens = 5 + np.arange(sentences[-1]) * 7919 % (VOCABULARY - 5)
    return Block(tokens.astype(np.uint16), sentences, np.append(np.arange(0, 90, 7), 90))


def originals(samples: Samples) -> np.ndarray:
    """The tokens of all rows, targets put back."""
    tokens = samples.tokens.copy()
    tokens[samples.target_positions] = samples.target_ids
    return tokens


def text_of(samples: Samples) -> np.ndarray:
    """The ordinary tokens of all rows, targets put back."""
    tokens = originals(samples)
    return tokens[~np.isin(tokens, NEVER_MASKED)]


def targets_per_row(samples: Samples) -> np.ndarray:
    return np.diff(np.searchsorted(samples.target_positions, samples.offsets))
