"""`maskfleet corpus prepare`: filters and deduplicates raw text as a YAML file says, and shows the counts as tables."""

from collections.abc import Iterator

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_service.corpus.origin import by_count
from data_service.errors import PrepareError
from data_service.ingest.encodings import odd_text_warning
from data_service.ingest.inputs import InputListing
from data_service.prepare.configuration import Preparation, list_input_files
from data_service.prepare.prepare import prepare
from data_service.prepare.statistics import Statistics
from data_service.printable import one_line
from data_service.store.open import open_store
from launcher.app.cli.corpus_shown import show_build_progress
from launcher.app.cli.texts import default_worker_count, read_settings
from launcher.output import human_bytes
from launcher.runtime.recipe.document import DocumentWording

PREPARATION_WORDING = DocumentWording("preparation", "infra/docs/prepare.md", PrepareError)  # for messages on the YAML
_MAX_TABLE_ROWS = 20  # languages, licences or unread files that are listed


def prepare_with_progress(path: str, output: str, workers: int | None, console: Console) -> Statistics:
    """Run the preparation that the file at `path` describes, show progress on `console`, and return the statistics.

    Raises:
        PrepareError, InputError, StoreError: as `read_settings` and `data_service.prepare.prepare.prepare`.
    """
    preparation = read_settings(path, Preparation, PREPARATION_WORDING)
    listings = list_input_files(preparation, open_store(output))
    if unread := [item for listing in listings for item in listing.left_out]:
        typer.echo(f"Files not read: {len(unread):,}", err=True)
        for item in unread[:_MAX_TABLE_ROWS]:
            typer.echo(f"  {one_line(str(item))}", err=True)
    files = tuple(file for listing in listings for file in listing.files)
    with show_build_progress(console) as report:
        return prepare(preparation, output, workers or default_worker_count(InputListing(files, ())), report)


def statistics_tables(statistics: Statistics) -> Iterator[Table]:
    """Yield tables: documents dropped by each stage, with reasons, and documents left by source, language, licence."""
    stages = Table("stage", "documents", "dropped", "share", "reason", box=None, pad_edge=False)
    for stage in statistics.stages:
        dropped = sum(stage.dropped.values())
        share = f"{dropped / max(1, stage.entered):.1%}"
        changed = f"{stage.changed:,} changed" if stage.changed else ""
        changed = f"{stage.clustered:,} in clusters" if stage.clustered else changed
        if stage.paragraphs_cut:
            changed = f"{changed}: {stage.paragraphs_cut:,} paragraphs of {stage.characters_cut:,} characters cut"
        stages.add_row(stage.stage, f"{stage.entered:,}", f"{dropped:,}", share, changed)
        for reason, count in by_count(stage.dropped):
            stages.add_row("", "", f"{count:,}", f"{count / max(1, stage.entered):.1%}", reason)
        for reason, count in by_count(stage.cut):
            stages.add_row("", "", "", "", f"{count:,} cut: {reason}")
    stages.add_row("kept", f"{statistics.documents_kept:,}")
    yield stages
    sources = Table("source", "read", "kept", "text read", "text kept", box=None, pad_edge=False)
    for name, source in statistics.sources.items():
        counts = (f"{source.documents_read:,}", f"{source.documents_kept:,}")
        sizes = (human_bytes(source.text_bytes_read), human_bytes(source.text_bytes_kept))
        sources.add_row(Text(one_line(name)), *counts, *sizes)
        if warning := odd_text_warning(source.odd, source.documents_read):
            typer.echo(f"{one_line(name)}: {warning}", err=True)
    yield sources
    for title, values in (("language", statistics.languages), ("licence", statistics.licences)):
        table = Table(title, "documents", box=None, pad_edge=False)
        for value, count in list(values.items())[:_MAX_TABLE_ROWS]:
            table.add_row(Text(one_line(value) if value else "(none)"), f"{count:,}")
        yield table
