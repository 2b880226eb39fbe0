"""Shows a corpus in a terminal: the progress of a build, and its counts as tables.

In a log file, progress is one line at the beginning and one at the end of each stage.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_service.corpus.corpus import SPLITS, Corpus, SplitName, open_corpus
from data_service.corpus.removals import RemovalChain, load_removals
from data_service.corpus.sidecar import TextCount
from data_service.ingest.encodings import odd_text_warning
from data_service.ingest.pool import Progress as BuildProgress
from data_service.ingest.pool import ReportProgress
from data_service.printable import one_line
from data_service.stream.statistics import CorpusStats, ShuffleRadius
from launcher.output import human_bytes
from launcher.progress import BYTES_UNIT, Work, work

_MAX_BAR_CHARACTERS = 40  # characters of the longest bar


def stats_tables(stats: CorpusStats) -> Iterator[Table]:
    """Yield tables: both splits, dropped documents, how the text is shuffled, and a histogram of document lengths."""
    splits = Table("", "train", "held out", box=None, pad_edge=False)
    rows = (stats.train, stats.heldout)
    for name in ("documents", "sentences", "tokens", "blocks"):
        splits.add_row(name, *(f"{getattr(split, name):,}" for split in rows))
    splits.add_row("text", *(human_bytes(split.text_bytes) for split in rows))
    splits.add_row("tokens per byte", *(f"{split.tokens_per_byte:.3f}" for split in rows))
    yield splits
    counts = Table(show_header=False, box=None, pad_edge=False)
    if stats.pairs is not None:
        counts.add_row("each document", f"query, positive, {stats.pairs.negatives} negative(s)")
    for name, count in stats.counts.items():
        if not name.endswith("_text_bytes"):
            counts.add_row(name.replace("_", " "), f"{count:,}")
    counts.add_row("vocabulary", f"{stats.vocab_size:,} ids")
    counts.add_row("unigram entropy", f"{stats.unigram_entropy:.3f} nats a token")
    yield counts
    if stats.radius is not None:
        yield _shuffle_table(stats.radius)
    if stats.skipped:
        skipped = Table("bad records left out", box=None, pad_edge=False)
        for record in stats.skipped:
            skipped.add_row(Text(one_line(record)))
        yield skipped
    lengths = Table("tokens", "documents", "", box=None, pad_edge=False)
    most = max(stats.document_lengths.values(), default=1)
    for shortest, count in stats.document_lengths.items():
        lengths.add_row(f"{shortest:,}+", f"{count:,}", "█" * max(1, round(_MAX_BAR_CHARACTERS * count / most)))
    yield lengths


def _shuffle_table(radius: ShuffleRadius) -> Table:
    """Return a table that shows how widely a batch's rows are spread over the corpus, and the cost of reading them."""
    table = Table(show_header=False, box=None, pad_edge=False)
    of = f"of {radius.regions:,.0f} blocks, at most {radius.largest:.2%} from one"
    table.add_row(f"a batch of {radius.rows:,} rows", of)
    share = f"{radius.continued:.2%} of its rows (drawn evenly: {radius.uniform:.2%})"
    table.add_row("beside their continuation", share)
    reads = f"{radius.reads:,.1f} of {human_bytes(round(radius.read_bytes))}"
    table.add_row("reads of a batch", f"{reads}, {radius.amplification:.3f} bytes read per byte used")
    return table


def licence_table(counted: Mapping[str | None, Mapping[SplitName, TextCount]]) -> Table:
    """Return a table of documents and tokens by licence."""
    table = Table("licence", "documents", "tokens", "held-out documents", "held-out tokens", box=None, pad_edge=False)
    for licence, parts in counted.items():
        numbers = (f"{n:,}" for part in parts.values() for n in (part.documents, part.tokens))
        table.add_row(Text("(none)" if licence is None else one_line(licence)), *numbers)
    return table


def removal_lines(corpus: Corpus, chain: RemovalChain) -> Iterator[str]:
    """Yield a line for each removal, with time, name and reason, and below it a line for each of its documents."""
    for number, removal in enumerate(chain.removals, 1):
        at = datetime.fromtimestamp(removal.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        yield f"removal {number}, {at}, by {removal.by}: {one_line(removal.reason)}"
        for split in SPLITS:
            gone, table = getattr(removal, split), corpus.table(split)
            for document, block, start, stop in zip(*(c.tolist() for c in vars(gone).values()), strict=True):
                yield f"  {split} {document}: {table.block_shard_key(block)}, block {block}, tokens {start} to {stop}"
    if not chain.removals:
        yield "nothing was removed"


def removal_note(uri: str) -> str | None:
    """Return a note on documents that were removed, which the corpus's counts still include; None if there are none."""
    corpus = open_corpus(uri)
    chain = load_removals(corpus.store, corpus.manifest)
    if not chain.removals:
        return None
    gone = [chain.removed_documents(split) for split in SPLITS]
    documents, tokens = sum(map(len, gone)), sum(part.token_count for part in gone)
    return f"of these, {documents:,} documents of {tokens:,} tokens were removed: maskfleet corpus show --removed"


def text_warning(stats: CorpusStats) -> str | None:
    """Return a warning if the text looks wrong, as in a wrong encoding; else None."""
    return odd_text_warning(
        stats.counts.get("odd", 0),
        stats.counts.get("documents_read", 0),
        stats.train.text_bytes,
        stats.train.tokens,
    )


def heldout_note(stats: CorpusStats) -> str | None:
    """Return a note on the held-out text if it is not the requested share of documents; else None."""
    if stats.heldout_rule is None:
        return None
    share = stats.heldout.tokens / max(1, stats.heldout.tokens + stats.train.tokens)
    if stats.heldout_rule.clusters and stats.heldout_rule.unit == "document":
        return (
            f"held out for evaluation: {stats.heldout.documents:,} documents, {share:.2%} of the tokens, each with all "
            "near duplicates that `corpus prepare` found"
        )
    if stats.heldout_rule.unit == "stretch":
        return (
            f"held out for evaluation: {stats.heldout.documents:,} stretches of text, each cut at paragraph or "
            f"sentence ends, {share:.2%} of the tokens; the documents are too few or too long to hold whole ones out"
        )
    return (
        f"held out for evaluation: {stats.heldout.documents:,} documents, {share:.2%} of the tokens; the share "
        "that was asked for would have been too little text, or too much"
    )


@contextmanager
def show_build_progress(console: Console) -> Iterator[ReportProgress]:
    """Yield a function that shows the progress of a build."""
    stage, shown = "", ExitStack()
    begun: Work | None = None

    def show_stage_progress(progress: BuildProgress) -> None:
        nonlocal stage, begun
        if begun is None or progress.stage != stage:
            shown.close()
            begun = shown.enter_context(work(progress.stage, progress.bytes_total, BYTES_UNIT))
            begun.set_already_done(progress.bytes_done)
        if not console.is_terminal and (progress.done == progress.total or progress.stage != stage):
            size = f"{human_bytes(progress.bytes_done)} of {human_bytes(progress.bytes_total)}"
            tasks = f"{progress.done}/{progress.total} tasks"
            console.print(f"{progress.stage}: {tasks}, {size}", highlight=False)
        stage = progress.stage
        begun.set_done(progress.bytes_done, progress.bytes_total)

    with shown:
        yield show_stage_progress
