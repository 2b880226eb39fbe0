"""`maskfleet corpus append`: adds new text to a corpus, without rewriting a shard."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.app.cli.corpus_options import (
    BuildWorkersOption,
    DictionaryOption,
    LexiconOption,
    ProvenanceOption,
    TxtDocuments,
    UserWordsOption,
)
from launcher.app.cli.options import (
    AcceptLossOption,
    BadBytes,
    BadRecordsOption,
    CorpusArgument,
    DelimiterOption,
    InputsArgument,
    JsonOption,
    delimiter_character,
    print_json,
    validate_options,
)

if TYPE_CHECKING:
    from data_service.ingest.append import AppendReport
    from data_service.ingest.options import BuildOptions

_DEFAULT_HELP = "Default: as the corpus was built."
_EncodingOverride = Annotated[
    str | None, typer.Option("--encoding", help=f"Encoding of .txt, JSON lines, CSV and TSV. {_DEFAULT_HELP}")
]
_BadBytesOverride = Annotated[
    BadBytes | None, typer.Option("--on-bad-bytes", help=f"What to do if text is not in its encoding. {_DEFAULT_HELP}")
]


def append(
    corpus: CorpusArgument,
    inputs: InputsArgument,
    out: Annotated[str, typer.Option("--out", help="New folder or s3:// URI for the extended corpus.")],
    text_field: Annotated[
        str | None, typer.Option("--text-field", help=f"Field or column that holds the text. {_DEFAULT_HELP}")
    ] = None,
    txt_documents: Annotated[
        TxtDocuments | None, typer.Option("--txt-documents", help=f"How .txt is split into documents. {_DEFAULT_HELP}")
    ] = None,
    encoding: _EncodingOverride = None,
    delimiter: DelimiterOption = None,
    on_bad_bytes: _BadBytesOverride = None,
    on_bad_records: BadRecordsOption = "error",
    provenance: ProvenanceOption = None,
    dictionary: DictionaryOption = None,
    user_words: UserWordsOption = None,
    lexicon: LexiconOption = None,
    accept_loss: AcceptLossOption = None,
    workers: BuildWorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write to OUT a corpus of the documents of CORPUS and new ones. CORPUS and the runs on it stay valid.

    The new text is built into OUT/added with CORPUS's tokenizer, held-out rule and options; OUT's manifest refers to
    the shards of both. Documents that CORPUS contains are left out; a new document with a known id is refused.

    Example: `maskfleet corpus append s3://bucket/news 'news-2026/*.jsonl.zst' --out s3://bucket/news-with-2026`
    """
    from data_service.corpus.corpus import open_corpus
    from data_service.ingest.append import options_from_corpus
    from data_service.ingest.options import BuildOptions
    from launcher.app.cli.texts import choose_worker_count, read_provenance

    others: dict[str, Any] = {
        "text_field": text_field,
        "txt_documents": txt_documents,
        "encoding": encoding,
        "delimiter": delimiter_character(delimiter),
        "on_bad_bytes": on_bad_bytes,
        "provenance": None if provenance is None else read_provenance(provenance),
        "accept_loss": accept_loss,
    }
    given = {name: value for name, value in others.items() if value is not None}
    validate_options(BuildOptions, **given)  # raises OptionError if a value is invalid
    files = {"dictionary": dictionary, "user_words": user_words, "lexicon": lexicon}
    options = options_from_corpus(
        open_corpus(corpus),
        workers=choose_worker_count(inputs, workers),
        on_bad_records=on_bad_records,
        word_files={name: uri for name, uri in files.items() if uri is not None},
        **given,
    )
    report = _append_with_progress(corpus, inputs, out, options=options, own=provenance is not None, as_json=as_json)
    if as_json:
        print_json([vars(report)])
    else:
        before = f"; {report.earlier_copies:,} copies left out before" if report.earlier_copies else ""
        counted = f"{report.copies:,} of them copies, left out; {report.removed:,} removed{before}"
        typer.echo(f"{report.added:,} documents added, {counted}; {report.documents:,} in all: {out}")


def _append_with_progress(
    corpus: str, inputs: list[str], out: str, *, options: "BuildOptions", own: bool, as_json: bool
) -> "AppendReport":
    """Append documents, and show progress. `own`: whether the provenance in `options` was given for these inputs."""
    import time

    from rich.console import Console

    from data_service.ingest.append import append_documents
    from launcher.app.cli.corpus_shown import show_build_progress
    from launcher.progress import work
    from launcher.runtime.run.request_stop import user_at_host

    with work("comparing documents") as now, show_build_progress(Console(stderr=as_json)) as progress:
        return append_documents(
            corpus,
            inputs,
            out,
            options,
            removed_by=user_at_host(),
            removed_at=int(time.time()),
            progress=progress,
            own_provenance=own,
            report=now.advance,
        )
