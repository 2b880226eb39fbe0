"""The shuffle's radius: how much of a corpus one batch draws on. Measured on the plan itself; no text is read.

A batch should be what a uniform draw from the epoch would be. How far it is from that shows in three figures: the
regions (blocks) that its rows come from, the rows whose continuation in the text is in the same batch, and the rows
with any other row of about the same document there. What that costs is the bytes read for each byte used, and the
number and size of the reads. What is wanted, and why, is in the README.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import BlockTable, block_table
from data_service.errors import PlanError
from data_service.samples.inputs import Lanes, Packed, TextPairs
from data_service.samples.masking import MlmMasking, NoMasking
from data_service.samples.packing import contiguous_rows
from data_service.samples.spec import SourceSpec, StreamSpec, WindowSize
from data_service.stream.plan import StreamPlan
from data_service.tokenizers.specials import SpecialIds

NEAR = 4  # rows apart, either way, that count as near: 2,000 tokens at length 512, longer than most articles
_BATCHES = 16  # looked at, from all over an epoch
_APART = 1 << 32  # more than the rows of a block
_BOUNDARY, _SENTENCE, _DOCUMENT = (
    8,
    24,
    600,
)  # bytes of a bound; tokens of a sentence and a document of English prose


@dataclass(frozen=True)
class Radius:
    """Means over batches from all over an epoch.

    Attributes:
        rows: in a batch.
        regions: blocks that its rows come from.
        largest: share of its rows that come from the block that gives most.
        continued: share of its rows whose continuation in the text is in it too.
        near: share of its rows with another one at most `NEAR` rows away in the text.
        uniform: `continued` of a uniform draw from an epoch.
        amplification: bytes read for a byte used: a block at a window's edge is read for both windows.
        read_bytes: of one read, a block.
        reads: for a batch.
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


def radius(plan: StreamPlan, tables: Sequence[BlockTable], batch: int) -> Radius:
    """The radius of batches of `batch` rows of a plan over corpora with these tables.

    Raises:
        PlanError: a batch is larger than an epoch.
    """
    samples = plan.grid.samples_per_epoch
    if batch > samples:
        raise PlanError(
            f"a batch of {batch:,} rows is larger than an epoch of {samples:,}",
            remedy=f"use a batch of {samples:,} rows or less, or more text",
        )
    starts = np.unique(np.linspace(0, samples // batch - 1, _BATCHES, dtype=np.int64)) * batch
    windows = {plan.grid.window_of(start) for start in starts.tolist()}
    reads = _sum(_reads(plan, tables, window) for window in windows)
    share = batch / sum(plan.grid.size(window) for window in windows)
    found = [_in_batch(plan, start, start + batch) for start in starts.tolist()]
    return Radius(
        rows=batch,
        amplification=reads.fetched / reads.used,
        read_bytes=reads.fetched / reads.number,
        reads=reads.number * share,
        uniform=(batch - 1) / max(1, samples - 1),
        **{name: float(np.mean([one[name] for one in found])) for name in found[0]},
    )


def _in_batch(plan: StreamPlan, start: int, stop: int) -> dict[str, float]:
    """The figures of samples `start` to `stop` of epoch 0."""
    parts = [_rows(plan, *span) for span in plan.grid.spans(start, stop)]
    blocks, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
    _, numbers, sizes = np.unique(blocks, axis=0, return_inverse=True, return_counts=True)
    texts = plan.spec.input  # with both directions, two rows are of one text
    step = 2 if isinstance(texts, Lanes) and texts.both_directions else 1
    places = numbers * _APART + rows // step
    after = np.isin(places + 1, places)
    near = [np.isin(places + away, places) for away in range(-NEAR, NEAR + 1) if away]
    return {
        "regions": float(len(sizes)),
        "largest": float(sizes.max() / len(rows)),
        "continued": float(after.mean()),
        "near": float(np.any(near, axis=0).mean()),
    }


def _rows(
    plan: StreamPlan, window: int, first: int, last: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[N, 3] the source, block and reading that samples `first` to `last` of a window are of, and [N] their rows."""
    made = plan.window(0, window)
    things = made.order.many(np.arange(first, last))
    ends = np.cumsum([len(piece) for piece in made.pieces], dtype=np.int64)
    piece = np.searchsorted(ends, things, side="right")
    places = np.array([(p.source, p.block, p.epoch, p.stop) for p in made.pieces], dtype=np.int64)[piece]
    rows: NDArray[np.int64] = places[:, 3] - (ends[piece] - things)
    return places[:, :3], rows


class _Reads(NamedTuple):
    """Bytes fetched, those of them whose rows are used, and the number of reads."""

    fetched: float
    used: float
    number: int


def _reads(plan: StreamPlan, tables: Sequence[BlockTable], window: int) -> _Reads:
    pieces = plan.window(0, window).pieces
    lengths = [float(tables[piece.source].length[piece.block]) for piece in pieces]
    used = [length * len(p) / plan.rows(p) for length, p in zip(lengths, pieces, strict=True)]
    return _Reads(sum(lengths), sum(used), len(pieces))


def _sum(reads: Iterable[_Reads]) -> _Reads:
    fetched, used, number = zip(*reads, strict=True)
    return _Reads(sum(fetched), sum(used), sum(number))


def expected_radius(
    tokens: Sequence[float], *, batch: int, length: int, spread: bool, block_tokens: int
) -> Radius:
    """The radius of corpora that need not exist: sources of so many tokens, in blocks of `block_tokens`."""
    tables = [_imagined(round(source / block_tokens), block_tokens) for source in tokens]
    return corpus_radius(tables, batch=batch, length=length, spread=spread)


def corpus_radius(
    tables: Sequence[BlockTable], *, batch: int, length: int, spread: bool, pairs: bool = False
) -> Radius:
    """The radius of batches of full rows of these corpora, mixed by their tokens, or of examples of `pairs`. Raises
    PlanError as `radius`.
    """
    sources = (SourceSpec(name=str(i), uri="", manifest_fingerprint=str(i)) for i in range(len(tables)))
    spec = StreamSpec(
        sources=tuple(sources),
        input=TextPairs(packing="pairs") if pairs else Packed(packing="contiguous"),
        masking=NoMasking() if pairs else MlmMasking(),
        length=length,
        special=SpecialIds(0, 1, 2, 3, 4),
        never_masked=(0, 1, 2, 3, 4),
        vocab_size=1 << 16,
        seed=0,
        window=WindowSize.of_batches(batch, spread=spread),
    )
    counts = tuple(
        table.documents if pairs else contiguous_rows(table.tokens, table.documents, length)
        for table in tables
    )
    return radius(StreamPlan(spec, tuple(tables), counts), tables, batch)


def _imagined(blocks: int, tokens: int) -> BlockTable:
    """Blocks with nothing behind them, of English prose's sentences and documents."""
    sentences, documents = tokens // _SENTENCE, max(1, tokens // _DOCUMENT)
    size = 2 * tokens + _BOUNDARY * (sentences + documents)
    row = (0, 0, size, tokens, sentences, documents)
    return block_table([row] * max(1, blocks), [""] * max(1, blocks), ["imagined"])
