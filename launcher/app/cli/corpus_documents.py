"""`maskfleet corpus show`, `find` and `card`: documents, their origin, and removals."""

from typing import Annotated, Literal

import typer

from launcher.app.cli.options import CorpusArgument, JsonOption, print_json, refuse_without_effect


def show(
    corpus: CorpusArgument,
    index: Annotated[int, typer.Option("--index", min=0, help="Number of the first document.")] = 0,
    count: Annotated[int, typer.Option("--count", min=1, help="How many documents.")] = 1,
    split: Annotated[Literal["train", "heldout"], typer.Option("--split", help="Which documents.")] = "train",
    licences: Annotated[
        bool, typer.Option("--licences", help="Print counts of documents and tokens by licence instead.")
    ] = False,
    removed: Annotated[
        bool, typer.Option("--removed", help="List the documents that `corpus remove` removed instead.")
    ] = False,
) -> None:
    """Print documents as training sees them: decoded from their tokens, one sentence or text of a pair per line."""
    from itertools import repeat

    from data_service.corpus.corpus import show_documents
    from data_service.printable import escape_controls

    if licences:
        refuse_without_effect("--licences", {"--removed": removed})
        _print_licences(corpus)
        return
    if removed:
        _print_removals(corpus)
        return
    for document in show_documents(corpus, split, index, count):
        place = f"{document.shard}, block {document.block}, document {document.document}"
        gone = "" if document.removal is None else f", removed (removal {document.removal})"
        typer.echo(escape_controls(f"== {place}: {document.tokens:,} tokens{gone}"))
        names = [f"{name}: " for name in document.pairs.text_names] if document.pairs is not None else repeat("")
        for name, sentence in zip(names, document.sentences, strict=False):
            line = sentence.removeprefix("\r").removeprefix("\n")  # the newline that ends the previous sentence
            typer.echo(escape_controls(name + line.rstrip("\n")))


def _print_licences(uri: str) -> None:
    from data_service.corpus.corpus import open_corpus
    from data_service.corpus.sidecar import count_text_by_field
    from launcher.app.cli.corpus_shown import licence_table
    from launcher.output import print_table

    print_table(licence_table(count_text_by_field(open_corpus(uri), "licence")))


def _print_removals(uri: str) -> None:
    from data_service.corpus.corpus import open_corpus
    from data_service.corpus.removals import load_removals
    from data_service.printable import escape_controls
    from launcher.app.cli.corpus_shown import removal_lines

    opened = open_corpus(uri)
    for line in removal_lines(opened, load_removals(opened.store, opened.manifest)):
        typer.echo(escape_controls(line))


def find(
    corpus: CorpusArgument,
    document_id: Annotated[str | None, typer.Option("--id", help="The document's id.")] = None,
    url: Annotated[str | None, typer.Option("--url", help="The URL that it is from.")] = None,
) -> None:
    """Find documents by id or URL, in a corpus that was built with --provenance.

    Prints each document's number, shard, block, number in the block and token range; exit code 1 if none is found.
    """
    from data_service.corpus.corpus import open_corpus
    from data_service.corpus.removals import load_removals
    from data_service.corpus.sidecar import find_documents
    from data_service.printable import escape_controls
    from launcher.errors import OptionError

    wanted = {name: value for name, value in {"id": document_id, "url": url}.items() if value is not None}
    if not wanted:
        raise OptionError("nothing to find", remedy="give --id or --url")
    opened, found = open_corpus(corpus), False
    removals = load_removals(opened.store, opened.manifest)
    for document in find_documents(opened, **wanted):
        found = True
        removal = removals.removal_number(document.split, document.number)
        gone = "" if removal is None else f", removed (removal {removal})"
        typer.echo(escape_controls(f"{document}{gone}"))
    if not found:
        typer.echo("no such document", err=True)
        raise typer.Exit(1)


def card(corpus: CorpusArgument, as_json: JsonOption = False) -> None:
    """Print the data card of a corpus as Markdown: its text, origin, licences, filters, the evaluation sets that it was
    searched for, removals, and hashes.

    The model card of every model that is exported from a run contains the data cards of its corpora.

    Example: `maskfleet corpus card s3://bucket/news > news.md`
    """
    from data_service.corpus.corpus import open_corpus
    from data_service.corpus.data_card import make_card, render_markdown
    from data_service.printable import escape_controls

    opened = open_corpus(corpus)
    found = make_card(opened)
    if as_json:
        print_json([found.model_dump(mode="json")])
        return
    typer.echo(escape_controls(render_markdown(found, f"Data card of {opened.store.uri}")), nl=False)
