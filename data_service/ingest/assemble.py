"""Makes the manifest of a corpus from the receipts of its build."""

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import (
    TOKENIZER,
    BlockTable,
    BuildLayout,
    CorpusManifest,
    HeldoutRule,
    WrittenShard,
    block_table,
    shard_key,
)
from data_service.errors import CorpusError
from data_service.ingest.configuration import CONTENT, Configuration, content
from data_service.ingest.heldout import bound
from data_service.ingest.inputs import InputListing
from data_service.ingest.pool import Progress, ReportProgress
from data_service.ingest.records import LISTED, with_lines
from data_service.ingest.scan import Scanned
from data_service.ingest.write import LENGTHS, PartSummary, Written
from data_service.store.base import digest, together
from data_service.tokenizers.tokenizer import Tokenizer


def assemble(
    layout: BuildLayout,
    *,
    options: Configuration,
    tokenizer: Tokenizer,
    scanned: list[Scanned],
    written: list[Written],
    listing: InputListing,
    heldout_rule: HeldoutRule,
    progress: ReportProgress,
) -> CorpusManifest:
    """The manifest of what the tasks wrote, in the order of the splits. Reads every split's token counts.

    Raises:
        CorpusError: no document with a token is left for training, or for evaluation though some text was to be held
            out.
    """
    # Both sides must have tokens.
    train, heldout = [part.train for part in written], [part.heldout for part in written]
    if not any(part.shard for part in train):
        raise CorpusError(
            f"no document is left for training in {layout.output}",
            remedy="give more text, or a smaller --heldout",
        )
    if heldout_rule.below and not any(part.shard for part in heldout):
        raise CorpusError(
            f"no held-out text of {layout.output} has a token",
            remedy="use a tokenizer that was trained on such text, or give more text",
        )
    # The tables of blocks, the shards' digests, and the record of how the corpus was built.
    fraction = float(str(options["heldout_fraction"]))
    as_asked = heldout_rule.unit == "document" and heldout_rule.below == bound(fraction)
    shards = _shards("train", train) | _shards("heldout", heldout)
    files = tokenizer.save_files()
    return CorpusManifest(
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        heldout_fraction=fraction,
        train=_table("train", train),
        heldout=_table("heldout", heldout),
        unigram=_unigram(layout, len(written), tokenizer.vocab_size, progress),
        shard_sizes={key: shard.size for key, shard in shards.items()},
        shard_digests={key: shard.digest for key, shard in shards.items()},
        counts=_counts(scanned, written) | {"ignored_files": len(listing.left_out)},
        options={**options, CONTENT: content(scanned)},
        document_lengths=tuple(sum(part.lengths[k] for part in train) for k in range(LENGTHS)),
        tokenizer_files={f"{TOKENIZER}/{name}": digest(files[name]) for name in sorted(files)},
        heldout_rule=None if as_asked else heldout_rule,
        skipped=_skipped(scanned, listing),
        left_out=tuple(str(item) for item in listing.left_out[:LISTED]),
    )


def _skipped(scanned: list[Scanned], listing: InputListing) -> tuple[str, ...]:
    first = [record for split in scanned for record in split.first_skipped][:LISTED]
    return tuple(str(record) for record in with_lines(first, listing.files))


def _shards(part: str, summaries: list[PartSummary]) -> dict[str, WrittenShard]:
    return {shard_key(part, i): summary.shard for i, summary in enumerate(summaries) if summary.shard}


def _table(part: str, summaries: list[PartSummary]) -> BlockTable:
    shards = _shards(part, summaries)
    blocks = [(number, block) for number, shard in enumerate(shards.values()) for block in shard.blocks]
    rows = [(n, b.offset, b.length, b.tokens, b.sentences, b.documents) for n, b in blocks]
    return block_table(rows, [block.digest for _, block in blocks], list(shards))


def _unigram(
    layout: BuildLayout, splits: int, vocab_size: int, progress: ReportProgress
) -> NDArray[np.int64]:
    total = np.zeros(vocab_size, dtype=np.int64)
    keys = [layout.unigram(index) for index in range(splits)]
    for done, counts in enumerate(together(layout.open().get, keys), start=1):
        total += np.frombuffer(counts, dtype=np.int64)
        progress(Progress("assembling", done, splits, done * total.nbytes, splits * total.nbytes))
    return total


def _counts(scanned: list[Scanned], written: list[Written]) -> dict[str, int]:
    odd = sum(split.odd for split in scanned)
    return ({"odd": odd} if odd else {}) | {
        "documents_read": sum(split.documents + split.empty for split in scanned),
        "empty": sum(split.empty for split in scanned),
        "skipped": sum(split.skipped for split in scanned),
        "replaced": sum(split.replaced for split in scanned),
        "duplicates": sum(split.duplicates for split in written),
        "without_tokens": sum(split.without_tokens for split in written),
        "train_text_bytes": sum(split.train.text_bytes for split in written),
        "heldout_text_bytes": sum(split.heldout.text_bytes for split in written),
    }
