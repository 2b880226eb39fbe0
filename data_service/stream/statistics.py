"""What a corpus holds, from its manifest alone: counts of its splits, lengths of documents, the shuffle's radius."""

from dataclasses import dataclass

import numpy as np

from data_service.corpus.corpus import open_corpus
from data_service.corpus.manifest import BlockTable, CorpusManifest, HeldoutRule, PairTexts
from data_service.errors import PlanError
from data_service.stream.radius import Radius, corpus_radius


@dataclass(frozen=True)
class SplitStats:
    """One split's counts; `text_bytes` is the UTF-8 size of its documents as they were read."""

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
    """What a corpus holds, from its manifest alone.

    Attributes:
        counts: documents read; how many were empty, duplicates, without tokens, or had bad bytes replaced; bad records.
        unigram_entropy: nats a token of the training split: the loss of guessing by frequency.
        skipped: the first hundred bad records that were left out, with file and place.
        pairs: texts of an example in a corpus of pairs, whose documents are examples; None in one of text.
        document_lengths: {n: training documents of n to 2n - 1 tokens}, n a power of two.
        radius: of the shuffle of training rows; None where an epoch has less than a batch.
        heldout_rule: what was held out in place of the share of documents that was asked for.
    """

    train: SplitStats
    heldout: SplitStats
    vocab_size: int
    counts: dict[str, int]
    unigram_entropy: float
    document_lengths: dict[int, int]
    radius: Radius | None
    heldout_rule: HeldoutRule | None
    skipped: tuple[str, ...]
    pairs: PairTexts | None = None


def corpus_stats(uri: str, *, batch: int = 8192, length: int = 512) -> CorpusStats:
    """Counts of a corpus, and how wide batches of so many rows of so many tokens reach in it. Reads the manifest and
    nothing else. Raises as `open_corpus`.
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
        radius=_radius(manifest, batch, length),
        heldout_rule=manifest.heldout_rule,
        skipped=manifest.skipped,
        pairs=manifest.pairs,
    )


def _radius(manifest: CorpusManifest, batch: int, length: int) -> Radius | None:
    pairs = manifest.pairs is not None
    try:
        return corpus_radius([manifest.train], batch=batch, length=length, spread=True, pairs=pairs)
    except PlanError:  # smaller than a batch
        return None


def _split_stats(table: BlockTable, text_bytes: int) -> SplitStats:
    return SplitStats(
        blocks=len(table),
        documents=int(table.documents.sum()),
        sentences=int(table.sentences.sum()),
        tokens=int(table.tokens.sum()),
        text_bytes=text_bytes,
    )
