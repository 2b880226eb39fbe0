"""`maskfleet corpus`: builds verified shards from raw text, and shows their content."""

from typing import TYPE_CHECKING, Annotated

import typer

from launcher.app.cli.corpus_append import append
from launcher.app.cli.corpus_changes import merge, remove
from launcher.app.cli.corpus_documents import card, find, show
from launcher.app.cli.corpus_options import (
    BlockTokensOption,
    BuildWorkersOption,
    DictionaryOption,
    HeldoutLikeOption,
    HeldoutOption,
    LexiconOption,
    LinesOption,
    MaxDocumentBytesOption,
    NegativesFieldOption,
    NegativesOption,
    OutOption,
    PositiveFieldOption,
    ProvenanceOption,
    QueryFieldOption,
    Segmenter,
    SegmenterOption,
    SentencesOption,
    TextsKind,
    TextsOption,
    TokenizerOption,
    TxtDocumentsOption,
    UserWordsOption,
    WordsFieldOption,
)
from launcher.app.cli.options import (
    AcceptLossOption,
    BadBytesOption,
    BadRecordsOption,
    CorpusArgument,
    DelimiterOption,
    EncodingOption,
    InputsArgument,
    JsonOption,
    TextFieldOption,
    TokenizerRulesOption,
    print_json,
    refuse_without_effect,
    text_source_settings,
    validate_options,
)
from launcher.errors import OptionError

if TYPE_CHECKING:
    from data_service.ingest.options import BuildOptions

group = typer.Typer(no_args_is_help=True, help="Build corpora from raw text, verify, count and read them.")


@group.command()
def build(
    inputs: InputsArgument,
    out: OutOption,
    tokenizer: TokenizerOption,
    tokenizer_rules: TokenizerRulesOption = "agreeing",
    heldout: HeldoutOption = None,
    heldout_like: HeldoutLikeOption = None,
    workers: BuildWorkersOption = None,
    text_field: TextFieldOption = "text",
    texts: TextsOption = "plain",
    negatives: NegativesOption = None,
    query_field: QueryFieldOption = None,
    positive_field: PositiveFieldOption = None,
    negatives_field: NegativesFieldOption = None,
    txt_documents: TxtDocumentsOption = "file",
    sentences: SentencesOption = "any",
    lines: LinesOption = "keep",
    accept_loss: AcceptLossOption = None,
    segmenter: SegmenterOption = None,
    dictionary: DictionaryOption = None,
    user_words: UserWordsOption = None,
    words_field: WordsFieldOption = None,
    lexicon: LexiconOption = None,
    provenance: ProvenanceOption = None,
    encoding: EncodingOption = "utf-8",
    delimiter: DelimiterOption = None,
    on_bad_bytes: BadBytesOption = "error",
    on_bad_records: BadRecordsOption = "error",
    block_tokens: BlockTokensOption = 1 << 18,
    max_document_bytes: MaxDocumentBytesOption = 16 << 20,
) -> None:
    """Tokenise raw text into shards, drop exact duplicates, set held-out documents apart.

    The result does not depend on the number of workers. Repeat the command to continue an interrupted build.

    Example: `maskfleet corpus build 'news/*.jsonl.zst' --tokenizer s3://bucket/bpe-50k --out s3://bucket/news`
    """
    from data_service.ingest.options import BuildOptions
    from launcher.app.cli.texts import choose_worker_count, read_provenance

    options = validate_options(
        BuildOptions,
        option_names={"heldout_fraction": "--heldout", "pairs": "--texts pairs", "words": "--segmenter"},
        **text_source_settings(text_field, encoding, delimiter),
        pairs=_pair_settings(texts, negatives, query_field, positive_field, negatives_field),
        words=_word_settings(segmenter, dictionary, user_words, words_field, lexicon),
        provenance=None if provenance is None else read_provenance(provenance),
        txt_documents=txt_documents,
        sentences=sentences,
        lines=lines,
        accept_loss=accept_loss or (),
        tokenizer_rules=tokenizer_rules,
        on_bad_bytes=on_bad_bytes,
        on_bad_records=on_bad_records,
        **_heldout_settings(heldout, heldout_like),
        block_tokens=block_tokens,
        max_document_bytes=max_document_bytes,
        workers=choose_worker_count(inputs, workers),
    )
    _build_with_progress(inputs, out, tokenizer, options)


@group.command()
def prepare(
    file: Annotated[str, typer.Argument(metavar="PREPARE.yaml", help="Inputs and stages: infra/docs/prepare.md.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="New folder or s3:// URI for the documents.")],
    workers: BuildWorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read documents, filter them stage by stage, and store kept and dropped documents as Parquet.

    Every document keeps its id, source, URL, licence, language and date; dropped documents have a reason. The result
    does not depend on the number of workers. An interrupted command can be repeated. `corpus build` reads OUT.

    Example: `maskfleet corpus prepare prepare.yaml s3://bucket/prepared`
    """
    from rich.console import Console

    from launcher.app.cli.prepared import prepare_with_progress, statistics_tables
    from launcher.output import print_table

    statistics = prepare_with_progress(file, out, workers, Console(stderr=as_json))
    if as_json:
        print_json([statistics.model_dump(mode="json")])
        return
    for table in statistics_tables(statistics):
        print_table(table)


def _build_with_progress(inputs: list[str], out: str, tokenizer: str, options: "BuildOptions") -> None:
    from rich.console import Console

    from data_service.ingest.build import build_corpus
    from launcher.app.cli.corpus_shown import show_build_progress

    with show_build_progress(Console()) as progress:
        build_corpus(inputs, out, tokenizer, options, progress)
    stats(out)


def _pair_settings(
    texts: TextsKind,
    negative_count: int | None,
    query: str | None,
    positive: str | None,
    negatives: list[str] | None,
) -> dict[str, object] | None:
    """Return the settings of pairs that were given; None for running text.

    Raises:
        OptionError: settings of pairs are given without `--texts pairs`, or fields of negatives without negatives.
    """
    given = {"count": negative_count, "query": query, "positive": positive, "negatives": negatives or None}
    chosen: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if texts == "pairs":
        if negatives and not negative_count:
            raise OptionError(
                "--negatives-field is given, but pairs have no negatives without --negatives",
                remedy="add --negatives 1, or a larger number, or leave out --negatives-field",
            )
        return chosen
    if chosen:
        raise OptionError(
            "--negatives and fields of pairs are given, but the corpus is one of running text",
            remedy="add --texts pairs, or leave out these options",
        )
    return None


def _heldout_settings(fraction: float | None, uri: str | None) -> dict[str, object]:
    """Return the settings for holding out a share of the text, or text by the rule of the corpus at `uri`; {} for the
    default. Raises OptionError if both are given; CorpusError, StoreError."""
    from data_service.corpus.corpus import open_corpus
    from data_service.ingest.heldout import heldout_options_from_manifest

    if uri is None:
        return {} if fraction is None else {"heldout_fraction": fraction}
    refuse_without_effect("--heldout-like", {"--heldout": fraction is not None})
    return heldout_options_from_manifest(open_corpus(uri).manifest)


def _word_settings(
    segmenter: Segmenter | None,
    dictionary: str | None,
    user_words: str | None,
    words_field: str | None,
    lexicon: str | None,
) -> dict[str, object] | None:
    """Return the settings of word segmentation; None if there are none.

    Raises:
        OptionError: `--words-field` is given without `--segmenter field`.
    """
    if words_field is not None and segmenter != "field":
        raise OptionError(
            f"--words-field {words_field} is given, but words are not read from the input",
            remedy="add --segmenter field, or leave out --words-field",
        )
    given = {"dictionary": dictionary, "user_words": user_words, "field": words_field, "lexicon": lexicon}
    chosen: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if segmenter is None and not chosen:
        return None
    return {"segmenter": segmenter, **chosen}


@group.command()
def verify(corpus: CorpusArgument, as_json: JsonOption = False) -> None:
    """Read every byte and compare it with its hash. Names damaged files, blocks and gaps (exit code 1)."""
    from data_service.corpus.corpus import verify_corpus
    from data_service.printable import one_line
    from launcher.output import human_bytes
    from launcher.progress import BYTES_UNIT, work

    with work("reading and comparing", unit=BYTES_UNIT) as now:
        report = verify_corpus(corpus, now.advance)
    if as_json:
        print_json([vars(report) | {"damage": [str(damage) for damage in report.damage]}])
    else:
        for damage in report.damage:
            typer.echo(f"DAMAGED  {one_line(str(damage))}")
        size = human_bytes(report.bytes)
        typer.echo(f"{report.shards:,} shards, {report.blocks:,} blocks, {size} read, {len(report.damage)} damaged")
    if report.damage:
        raise typer.Exit(1)


@group.command()
def stats(
    corpus: CorpusArgument,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Rows per batch in shuffle figures.")] = 8192,
    length: Annotated[int, typer.Option("--length", min=8, help="Tokens per row.")] = 512,
    as_json: JsonOption = False,
) -> None:
    """Count documents, sentences, tokens and dropped duplicates; show document lengths, unigram entropy and shuffle."""
    from dataclasses import asdict

    from data_service.stream.statistics import corpus_stats
    from launcher.app.cli.corpus_shown import heldout_note, removal_note, stats_tables, text_warning
    from launcher.app.cli.texts import print_text_loss
    from launcher.output import print_table

    found = corpus_stats(corpus, batch=batch, length=length)
    if as_json:
        loss = None if found.loss is None else found.loss.model_dump(mode="json")
        print_json([asdict(found) | {"loss": loss}])
        return
    for table in stats_tables(found):
        print_table(table)
    gone = removal_note(corpus)
    if gone:
        typer.echo(gone)
    note = heldout_note(found)
    if note:
        typer.echo(note)
    print_text_loss(found.loss)
    warning = text_warning(found)
    if warning:
        typer.echo(warning, err=True)


@group.command(name="similar-words")
def similar_words(
    corpora: Annotated[list[str], typer.Argument(metavar="CORPUS", help="Folders or s3:// URIs of corpora.")],
    out: Annotated[str, typer.Option("--out", help="File or s3:// URI for the table; it must not exist.")],
    size: Annotated[int, typer.Option("--size", min=1, help="Dimensions of a word vector.")] = 100,
    window: Annotated[int, typer.Option("--window", min=1, help="Words of context on each side.")] = 5,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the text.")] = 5,
    least: Annotated[int, typer.Option("--least", min=1, help="Smallest number of occurrences of a word.")] = 5,
    neighbours: Annotated[
        int, typer.Option("--neighbours", min=1, help="Number of nearest words that count as similar.")
    ] = 10,
    most_tokens: Annotated[
        int, typer.Option("--most-tokens", min=1, help="Largest number of tokens to read from each corpus.")
    ] = 200_000_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the vectors.")] = 1,
) -> None:
    """Learn which words are similar, for MLM as correction (MacBERT): for each word the nearest of the same length.

    Needs gensim: pip install 'maskfleet[chinese]'. The table is reproducible: one thread and a fixed seed.

    Example: `maskfleet corpus similar-words s3://bucket/news-zh --out s3://bucket/similar-words.txt`
    """
    from data_service.stream.similar_words import SimilarWordOptions, write_similar_words
    from launcher.progress import work

    options = SimilarWordOptions(
        size=size,
        window=window,
        epochs=epochs,
        least=least,
        neighbours=neighbours,
        most_tokens=most_tokens,
        seed=seed,
    )
    with work("learning similar words", unit="blocks") as now:
        written = write_similar_words(corpora, out, options, now.set_done)
    typer.echo(f"{written.words:,} words, {written.with_similar:,} with a similar one: {out}")


group.command()(show)
group.command()(find)
group.command()(card)
group.command()(remove)
group.command()(merge)
group.command()(append)
