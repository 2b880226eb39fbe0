"""Statistics of a corpus, and of how widely the rows of a batch are spread over it (the shuffle's radius). No text is
read: the manifest and the plan are enough.

A batch should look like a uniform draw from the epoch. Three numbers show how far it is from that: the number of
regions (blocks) that its rows come from; the share of rows whose continuation in the text is in the same batch; and
the share of rows with another row nearby in the text, likely of the same document, in the batch. The cost of a good
shuffle shows in the bytes read for each byte used, and in the number and size of reads. The README says which values
are good, and why.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.corpus import open_corpus
from data_service.corpus.manifest import BlockTable, CorpusManifest, HeldoutRule, PairTexts, make_block_table
from data_service.errors import PlanError
from data_service.samples.lanes import Lanes
from data_service.samples.masking import MlmMasking, NoMasking
from data_service.samples.packing import PackedInput, count_contiguous_rows
from data_service.samples.spec import SourceSpec, StreamSpec, WindowSize
from data_service.samples.texts import TextPairs
from data_service.stream.plan import StreamPlan
from data_service.tokenizers.loss import TextLoss
from data_service.tokenizers.specials import SpecialIds

NEAR_ROWS = 4  # rows up to this distance are neighbours: 2,000 tokens at length 512, more than most articles
_EXAMINED_BATCHES = 16  # batches that are examined, spread over an epoch
_BLOCK_STRIDE_ROWS = 1 << 32  # numbers reserved for the rows of one block, which has fewer rows
# Bytes that store a boundary; mean numbers of tokens of a sentence and of a document in English prose.
_BOUNDARY_BYTES, _SENTENCE_TOKENS, _DOCUMENT_TOKENS = 8, 24, 600


@dataclass(frozen=True)
class ShuffleRadius:
    """How widely the rows of a batch are spread over the corpus: means over batches from all parts of an epoch.

    Attributes:
        rows: number of rows in a batch.
        regions: number of blocks that its rows come from.
        largest: share of its rows that come from one block, the one with the most.
        continued: share of its rows whose continuation in the text is also in the batch.
        near: share of its rows with another row of the batch at most `NEAR_ROWS` rows away in the text.
        uniform: value of `continued` if the batch were a uniform draw from an epoch.
        amplification: bytes read for each byte used; a block at a window's edge is read for both windows.
        read_bytes: bytes of one read, which is a block.
        reads: number of reads for a batch.
    """

    rows: int
    regions: float
    largest: float
    continued: float
    near: float
    uniform: float
    amplification: float
    read_bytes: float
    reads: float


def shuffle_radius(plan: StreamPlan, tables: Sequence[BlockTable], batch: int) -> ShuffleRadius:
    """Return the shuffle's radius for batches of `batch` rows of a plan. `tables`: the blocks of each source.

    Raises:
        PlanError: a batch is larger than an epoch.
    """
    samples = plan.epoch_layout.samples_per_epoch
    if batch > samples:
        raise PlanError(
            f"a batch of {batch:,} rows is larger than an epoch of {samples:,}",
            remedy=f"use a batch of {samples:,} rows or less, or more text",
        )
    starts = np.unique(np.linspace(0, samples // batch - 1, _EXAMINED_BATCHES, dtype=np.int64)) * batch
    windows = {plan.epoch_layout.window_with_sample(start) for start in starts.tolist()}
    reads = zip(*(_window_reads(plan, tables, window) for window in windows), strict=True)
    fetched, used, number = (sum(column) for column in reads)
    share = batch / sum(plan.epoch_layout.window_size(window) for window in windows)
    found = [_batch_statistics(plan, start, start + batch) for start in starts.tolist()]
    return ShuffleRadius(
        rows=batch,
        amplification=fetched / used,
        read_bytes=fetched / number,
        reads=number * share,
        uniform=(batch - 1) / max(1, samples - 1),
        **{name: float(np.mean([one[name] for one in found])) for name in found[0]},
    )


def _batch_statistics(plan: StreamPlan, start: int, stop: int) -> dict[str, float]:
    """Return the fields of `ShuffleRadius` for one batch: samples `start` to `stop` of epoch 0."""
    parts = [_find_rows(plan, *span) for span in plan.epoch_layout.split_by_window(start, stop)]
    blocks, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
    _, numbers, sizes = np.unique(blocks, axis=0, return_inverse=True, return_counts=True)
    texts = plan.spec.input  # with lanes in both directions, two rows hold the same text
    step = 2 if isinstance(texts, Lanes) and texts.both_directions else 1
    places = numbers * _BLOCK_STRIDE_ROWS + rows // step
    after = np.isin(places + 1, places)
    near = [np.isin(places + away, places) for away in range(-NEAR_ROWS, NEAR_ROWS + 1) if away]
    return {
        "regions": float(len(sizes)),
        "largest": float(sizes.max() / len(rows)),
        "continued": float(after.mean()),
        "near": float(np.any(near, axis=0).mean()),
    }


def _find_rows(plan: StreamPlan, window: int, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the origins of samples `first` to `last` of a window of epoch 0: [N, 3], whose columns are source, block
    and pass over the source; and [N], the row in the block."""
    made = plan.window(0, window)
    things = made.order.items_at(np.arange(first, last))
    ends = np.cumsum([len(piece) for piece in made.pieces], dtype=np.int64)
    piece = np.searchsorted(ends, things, side="right")
    places = np.array([(p.source, p.block, p.epoch, p.stop) for p in made.pieces], dtype=np.int64)[piece]
    rows: NDArray[np.int64] = places[:, 3] - (ends[piece] - things)
    return places[:, :3], rows


def _window_reads(plan: StreamPlan, tables: Sequence[BlockTable], window: int) -> tuple[float, float, int]:
    """Return the bytes fetched for a window, the bytes of the rows that it uses, and the number of reads."""
    pieces = plan.window(0, window).pieces
    lengths = [float(tables[piece.source].length[piece.block]) for piece in pieces]
    used = [length * len(p) / plan.rows_in_block(p) for length, p in zip(lengths, pieces, strict=True)]
    return sum(lengths), sum(used), len(pieces)


def expected_radius(
    tokens: Sequence[float], *, batch: int, length: int, is_spread: bool, block_tokens: int
) -> ShuffleRadius:
    """Return the shuffle's radius for imagined corpora, one per number in `tokens`, in blocks of `block_tokens`."""
    tables = [_imagine_table(round(source / block_tokens), block_tokens) for source in tokens]
    return corpus_radius(tables, batch=batch, length=length, spread=is_spread)


def corpus_radius(
    tables: Sequence[BlockTable], *, batch: int, length: int, spread: bool, pairs: bool = False
) -> ShuffleRadius:
    """Return the shuffle's radius for full rows of corpora that are mixed by their size. Raises PlanError as
    `shuffle_radius` does.

    `tables`: the blocks of each corpus. `pairs`: whether they are corpora of pairs, whose examples are the rows.
    """
    sources = (SourceSpec(name=str(i), uri="", manifest_fingerprint=str(i)) for i in range(len(tables)))
    spec = StreamSpec(
        sources=tuple(sources),
        input=TextPairs(packing="pairs") if pairs else PackedInput(packing="contiguous"),
        masking=NoMasking() if pairs else MlmMasking(),
        length=length,
        special=SpecialIds(0, 1, 2, 3, 4),
        never_masked=(0, 1, 2, 3, 4),
        vocab_size=1 << 16,
        seed=0,
        window=WindowSize.from_batches(batch, is_spread=spread),
    )
    counts = tuple(
        table.documents if pairs else count_contiguous_rows(table.tokens, table.documents, length) for table in tables
    )
    return shuffle_radius(StreamPlan(spec, tuple(tables), counts), tables, batch)


def _imagine_table(blocks: int, tokens: int) -> BlockTable:
    """Return a table of imagined blocks, with sentences and documents as long as in English prose."""
    sentences, documents = tokens // _SENTENCE_TOKENS, max(1, tokens // _DOCUMENT_TOKENS)
    size = 2 * tokens + _BOUNDARY_BYTES * (sentences + documents)
    row = (0, 0, size, tokens, sentences, documents)
    return make_block_table([row] * max(1, blocks), ["0" * 32] * max(1, blocks), ["imagined"])


@dataclass(frozen=True)
class SplitStats:
    """The counts of one split. `text_bytes`: UTF-8 size of its documents as they were read."""

    blocks: int
    documents: int
    sentences: int
    tokens: int
    text_bytes: int

    @property
    def tokens_per_byte(self) -> float:
        return self.tokens / self.text_bytes if self.text_bytes else 0.0


@dataclass(frozen=True)
class CorpusStats:
    """The statistics of a corpus, computed from its manifest alone.

    Attributes:
        counts: numbers of documents read, and of documents that were empty, duplicates, without tokens or had bad bytes
            replaced; and number of bad records.
        unigram_entropy: entropy of the training split's tokens in nats: the loss of guessing by frequency.
        skipped: first hundred bad records that were skipped, with file and place.
        pairs: texts of an example in a corpus of pairs, whose documents are examples; None in a corpus of text.
        document_lengths: numbers of training documents by length; entry n, a power of two, counts those of n to 2n - 1
            tokens.
        radius: radius of the shuffle of training rows; None if an epoch has less than a batch.
        heldout_rule: rule by which text was held out; None if it was just the requested share of documents.
        loss: text that the tokenizer loses; None if the build did not measure it.
    """

    train: SplitStats
    heldout: SplitStats
    vocab_size: int
    counts: dict[str, int]
    unigram_entropy: float
    document_lengths: dict[int, int]
    radius: ShuffleRadius | None
    heldout_rule: HeldoutRule | None
    loss: TextLoss | None
    skipped: tuple[str, ...]
    pairs: PairTexts | None = None


def corpus_stats(uri: str, *, batch: int = 8192, length: int = 512) -> CorpusStats:
    """Return the statistics of a corpus, reading only its manifest. Raises the errors of `open_corpus`.

    `batch`, `length`: rows of a batch and tokens of a row, for `radius`.
    """
    manifest = open_corpus(uri).manifest
    shares = manifest.unigram[manifest.unigram > 0] / max(1, manifest.unigram.sum())
    return CorpusStats(
        train=_split_stats(manifest.train, manifest.counts.get("train_text_bytes", 0)),
        heldout=_split_stats(manifest.heldout, manifest.counts.get("heldout_text_bytes", 0)),
        vocab_size=manifest.vocab_size,
        counts=manifest.counts,
        unigram_entropy=float(-(shares * np.log(shares)).sum()),
        document_lengths={1 << k: count for k, count in enumerate(manifest.document_lengths) if count},
        radius=_training_radius(manifest, batch, length),
        heldout_rule=_nondefault_heldout_rule(manifest),
        loss=manifest.loss,
        skipped=manifest.skipped,
        pairs=manifest.pairs,
    )


def _nondefault_heldout_rule(manifest: CorpusManifest) -> HeldoutRule | None:
    usual = HeldoutRule.from_fraction(manifest.heldout_fraction)
    rule = manifest.effective_heldout_rule
    return None if replace(rule, by_tokens=False) == usual else rule


def _training_radius(manifest: CorpusManifest, batch: int, length: int) -> ShuffleRadius | None:
    pairs = manifest.pairs is not None
    try:
        return corpus_radius([manifest.train], batch=batch, length=length, spread=True, pairs=pairs)
    except PlanError:  # the split is smaller than a batch
        return None


def _split_stats(table: BlockTable, text_bytes: int) -> SplitStats:
    return SplitStats(
        blocks=len(table),
        documents=int(table.documents.sum()),
        sentences=int(table.sentences.sum()),
        tokens=int(table.tokens.sum()),
        text_bytes=text_bytes,
    )
