"""`maskfleet corpus remove` and `corpus merge`: remove documents and merge corpora, without rewriting a shard."""

from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.options import CorpusArgument, JsonOption, print_json

if TYPE_CHECKING:
    from data_service.corpus.corpus import Corpus
    from data_service.corpus.removals import DocumentsBySplit


def remove(
    corpus: CorpusArgument,
    reason: Annotated[str, typer.Option("--reason", help="Reason, which is stored with the removal.")],
    ids: Annotated[
        str | None,
        typer.Option("--ids", metavar="FILE", help="File of document ids, one per line (of a --provenance corpus)."),
    ] = None,
    documents: Annotated[
        str | None,
        typer.Option("--documents", metavar="FILE", help="File of document numbers, one per line: 17, heldout:3."),
    ] = None,
    from_parts: Annotated[
        bool,
        typer.Option("--from-parts", help="All documents that were removed from the corpora merged into this one."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove documents. Manifest and shards are not changed, and every other token keeps its position.

    A removal is added to a list next to the manifest. Runs that are created later never read the documents; an existing
    run needs `maskfleet train RUN --without-removed`. If any document is not in the corpus, nothing is removed.

    Example: `maskfleet corpus remove s3://bucket/news --ids ids.txt --reason "request of 25 November"`
    """
    import time

    from data_service.corpus.corpus import open_corpus
    from data_service.corpus.remove import remove_documents
    from launcher.errors import OptionError
    from launcher.runtime.run.request_stop import user_at_host

    if (ids is not None, documents is not None, from_parts).count(True) != 1:
        raise OptionError("name the documents in one way", remedy="give one of --ids, --documents and --from-parts")
    if not reason.strip():
        raise OptionError("--reason is empty", remedy="say why the documents are removed: --reason TEXT")
    opened = open_corpus(corpus)
    wanted = _select_documents(opened, ids, documents)
    report = remove_documents(opened, wanted, removed_by=user_at_host(), removed_at=int(time.time()), reason=reason)
    if as_json:
        counts = {"documents": len(report.documents), "tokens": report.documents.token_count}
        print_json([{"removal": report.number, **counts, "removed_before": len(report.already)}])
        return
    if len(report.already):
        typer.echo(f"removed before: {len(report.already):,} documents")
    if report.number is None:
        typer.echo("nothing is left to remove")
    else:
        parts = (report.documents.train, report.documents.heldout)
        counted = ", ".join(f"{len(part):,} of {name}" for part, name in zip(parts, ("train", "heldout"), strict=True))
        typer.echo(f"removal {report.number}: {counted}, {report.documents.token_count:,} tokens")


def _select_documents(corpus: "Corpus", ids: str | None, documents: str | None) -> "DocumentsBySplit":
    """Return the documents that a file lists; without a file, those removed from the corpora merged into this one."""
    from data_service.corpus.remove import documents_by_id, documents_by_number, find_removed_in_parts
    from launcher.app.cli.texts import read_nonblank_lines
    from launcher.progress import work

    with work("finding documents") as now:
        if ids is not None:
            return documents_by_id(corpus, read_nonblank_lines(ids), now.advance)
        if documents is not None:
            return documents_by_number(corpus, read_nonblank_lines(documents), now.advance)
        return find_removed_in_parts(corpus)


def merge(
    corpora: Annotated[
        list[str], typer.Argument(metavar="CORPUS...", help="Folders or s3:// URIs of at least two corpora.")
    ],
    out: Annotated[str, typer.Option("--out", help="New folder or s3:// URI for the merged corpus.")],
    as_json: JsonOption = False,
) -> None:
    """Merge several corpora without copying a shard. They must stay where they are, and runs on them stay valid.

    A document that an earlier of the corpora contains is left out; removed documents stay removed. To add text to a
    corpus, use `maskfleet corpus append`, or build the new text into another corpus and merge both.

    Example: `maskfleet corpus merge s3://bucket/news-2025 s3://bucket/news-2026 --out s3://bucket/news`
    """
    import time

    from data_service.corpus.merge import merge_corpora
    from launcher.progress import work
    from launcher.runtime.run.request_stop import user_at_host

    with work("comparing documents", unit="blocks") as now:
        report = merge_corpora(corpora, out, removed_by=user_at_host(), removed_at=int(time.time()), report=now.advance)
    if as_json:
        print_json([vars(report)])
    else:
        counted = f"{report.copies:,} copies left out, {report.removed:,} removed before"
        if report.earlier_copies:
            counted += f", {report.earlier_copies:,} copies left out before"
        typer.echo(f"{report.documents:,} documents, {counted}: {out}")
