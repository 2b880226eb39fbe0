"""Building a window: read its blocks, cut, mask, and order the rows. A function of its arguments."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from data_service.corpora import Corpora
from data_service.errors import CorpusError
from data_service.plan import Piece, Window
from data_service.samples.make import block_key, cut, make_rows, structure_key
from data_service.samples.ragged import Samples
from data_service.samples.rows import deal_rows, join_rows
from data_service.shards.block import Block
from data_service.slabs import SlabLayout

# Requests in flight, about 10 MB of them: hides a store's latency behind the work on the block before.
_READERS = 16


def build_window(corpora: Corpora, window: Window, layout: SlabLayout) -> list[Samples]:
    """A window's samples in the slabs of `layout`.

    Raises:
        CorruptBlock, StoreError: a block that cannot be read.
    """
    made = [_make(corpora, piece, block) for piece, block in _read_ahead(corpora, window.pieces)]
    joined = join_rows(made)
    del made
    rows = window.order.many(np.arange(window.order.size))
    return deal_rows(joined, (rows[layout.positions(slab)] for slab in range(layout.slabs)))


def _make(corpora: Corpora, piece: Piece, block: Block) -> Samples:
    spec = corpora.spec
    rows = cut(block, spec, structure_key(spec, piece.source, piece.block, piece.epoch))
    if piece.stop > len(rows):
        raise CorpusError(
            f"{spec.sources[piece.source].uri}: block {piece.block} has {len(rows)} rows, "
            f"the plan counts on at least {piece.stop}",
            remedy="the row counts in the cache are not this corpus's: delete the cache and start again",
        )
    key = block_key(spec, piece.source, piece.block, piece.epoch)
    return make_rows(block, rows, piece.start, piece.stop, spec, key, corpora.starts_word, corpora.unigram)


def _read_ahead(corpora: Corpora, pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, Block]]:
    """The blocks of `pieces` in order, a few requested before they are needed."""
    with ThreadPoolExecutor(_READERS) as pool:
        pending: list[Future[Block]] = []
        for index, piece in enumerate(pieces):
            for ahead in pieces[index + len(pending) : index + _READERS]:
                pending.append(pool.submit(corpora.read, ahead.source, ahead.block))
            yield piece, pending.pop(0).result()
