"""A corpus's counts as tables."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from data_service.corpus import CorpusStats
from data_service.visible import one_line
from launcher.human import human_bytes

_BAR = 40  # characters of the longest bar


def stats_tables(stats: CorpusStats) -> Iterator[Table]:
    """Splits side by side, then what was dropped, then a histogram of document lengths."""
    splits = Table("", "train", "held out", box=None, pad_edge=False)
    rows = (stats.train, stats.heldout)
    for name in ("documents", "sentences", "tokens", "blocks"):
        splits.add_row(name, *(f"{getattr(split, name):,}" for split in rows))
    splits.add_row("text", *(human_bytes(split.text_bytes) for split in rows))
    splits.add_row("tokens per byte", *(f"{split.tokens_per_byte:.3f}" for split in rows))
    yield splits
    counts = Table(show_header=False, box=None, pad_edge=False)
    for name, count in stats.counts.items():
        if not name.endswith("_text_bytes"):
            counts.add_row(name.replace("_", " "), f"{count:,}")
    counts.add_row("vocabulary", f"{stats.vocab_size:,} ids")
    counts.add_row("unigram entropy", f"{stats.unigram_entropy:.3f} nats a token")
    yield counts
    if stats.skipped:
        skipped = Table("bad records left out", box=None, pad_edge=False)
        for record in stats.skipped:
            skipped.add_row(Text(one_line(record)))
        yield skipped
    lengths = Table("tokens", "documents", "", box=None, pad_edge=False)
    most = max(stats.document_lengths.values(), default=1)
    for shortest, count in stats.document_lengths.items():
        lengths.add_row(f"{shortest:,}+", f"{count:,}", "█" * max(1, round(_BAR * count / most)))
    yield lengths
