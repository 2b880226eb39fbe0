"""`maskfleet tokenizer`: trains a tokenizer, checks how well one fits some text, and adds words to one."""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launcher.app.cli.options import (
    AcceptLossOption,
    BadBytesOption,
    BadRecordsOption,
    DelimiterOption,
    EncodingOption,
    InputsArgument,
    JsonOption,
    TextFieldOption,
    TokenizerArgument,
    TokenizerRulesOption,
    print_json,
    text_source_settings,
    validate_options,
)

if TYPE_CHECKING:
    from data_service.tokenizers.tokenizer import Tokenizer
    from data_service.tokenizers.train import TokenizerOptions

group = typer.Typer(
    no_args_is_help=True, help="Train a tokenizer, check how well one fits some text, or add words to it."
)

_MB = 1_000_000
_DEFAULT_VOCABULARY_SIZE = 50_000
_LOSS_SAMPLE_BYTES = 4 * _MB  # bytes of text on which the text loss of a new tokenizer is measured


TokenizerKind = Literal["byte_bpe", "wordpiece", "unigram", "bpe"]
SampleOption = Annotated[
    int,
    typer.Option("--sample-mb", min=1, help="Most megabytes of text to read, spread over the whole input."),
]
ReplaceOption = Annotated[bool, typer.Option("--replace", help="Overwrite a tokenizer that the folder contains.")]


@group.command()
def train(
    inputs: InputsArgument,
    out: Annotated[str, typer.Option("--out", help="Folder or s3:// URI for the tokenizer's files.")],
    vocab_size: Annotated[
        int,
        typer.Option(
            "--vocab-size",
            help="Largest number of ids, with special tokens. Short or repetitive text may support fewer.",
        ),
    ] = _DEFAULT_VOCABULARY_SIZE,
    kind: Annotated[
        TokenizerKind,
        typer.Option(help="As in RoBERTa and DeBERTa, in BERT and ELECTRA, in ALBERT, or in XLNet, in this order."),
    ] = "byte_bpe",
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Lowercase text; keep accents.")] = False,
    strip_marks: Annotated[
        bool,
        typer.Option("--strip-marks", help="Remove accents, vowel signs and tone marks, as uncased BERT does."),
    ] = False,
    sample_mb: SampleOption = 2000,
    text_field: TextFieldOption = "text",
    encoding: EncodingOption = "utf-8",
    delimiter: DelimiterOption = None,
    on_bad_bytes: BadBytesOption = "error",
    on_bad_records: BadRecordsOption = "error",
    accept_loss: AcceptLossOption = None,
    replace: ReplaceOption = False,
) -> None:
    """Learn a vocabulary. The same text and options give the same files, byte for byte.

    `transformers.AutoTokenizer` can read the folder, too. A folder that contains a tokenizer is refused.

    Example: `maskfleet tokenizer train books/ news.jsonl.zst --out s3://bucket/bpe-50k`
    """
    from data_service.ingest.options import BuildOptions
    from data_service.tokenizers.load import save_tokenizer
    from data_service.tokenizers.train import TokenizerOptions
    from launcher.app.cli.texts import default_worker_count, sample_texts

    _check_no_tokenizer(out, replace)
    options = validate_options(
        BuildOptions,
        **text_source_settings(text_field, encoding, delimiter),
        on_bad_bytes=on_bad_bytes,
        on_bad_records=on_bad_records,
    )
    texts = sample_texts(inputs, options, sample_mb * _MB)
    folding = TokenizerOptions(lowercase=lowercase, strip_marks=strip_marks)
    tokenizer = _train_tokenizer(
        kind,
        texts,
        vocab_size,
        folding,
        workers=default_worker_count(inputs),
    )
    _check_loss(tokenizer, sample_texts(inputs, options, _LOSS_SAMPLE_BYTES, quiet=True), accept_loss)
    save_tokenizer(tokenizer, out)
    typer.echo(f"{kind} tokenizer of {tokenizer.vocab_size:,} ids at {out} (hash {tokenizer.hash[:12]})")


def _train_tokenizer(
    kind: TokenizerKind, texts: Iterable[str], max_ids: int, options: "TokenizerOptions", *, workers: int
) -> "Tokenizer":
    """Train a tokenizer of at most `max_ids` ids. Print to standard error if it has fewer, and the share of words that
    were too rare to be used."""
    from data_service.tokenizers.files import TRAINING_REPORT
    from data_service.tokenizers.train import train_tokenizer
    from launcher.progress import work

    with work("learning the vocabulary"):
        tokenizer = train_tokenizer(kind, texts, max_ids, options, allow_fewer_ids=True, workers=workers)
    if tokenizer.vocab_size < max_ids:
        typer.echo(f"{max_ids:,} ids were requested, but the text supports {tokenizer.vocab_size:,}", err=True)
    report = json.loads(tokenizer.save_files()[TRAINING_REPORT])
    if share := report["left_out"] / report["words"]:
        typer.echo(f"Left out as too rare: {share:.2%} of {report['words']:,} words", err=True)
    return tokenizer


def _check_loss(tokenizer: "Tokenizer", texts: Iterable[str], accepted: Sequence[str] | None) -> None:
    """Print what a new tokenizer loses of the text that it was trained on.

    Raises:
        TokenizerError: it loses much of the text by a kind of loss that is not in `accepted`.
    """
    from data_service.tokenizers.check import measure_loss
    from data_service.tokenizers.loss import check_text_loss
    from launcher.app.cli.texts import print_text_loss

    loss = measure_loss(tokenizer, texts)
    what = f"a {tokenizer.kind} vocabulary does not hold this text"
    check_text_loss(loss, accepted or (), what, remedy="choose another --kind (byte_bpe holds every text)")
    print_text_loss(loss)


@group.command()
def check(
    tokenizer: TokenizerArgument,
    inputs: InputsArgument,
    tokenizer_rules: TokenizerRulesOption = "agreeing",
    sample_mb: SampleOption = 20,
    text_field: TextFieldOption = "text",
    encoding: EncodingOption = "utf-8",
    delimiter: DelimiterOption = None,
    on_bad_bytes: BadBytesOption = "error",
    on_bad_records: BadRecordsOption = "error",
    as_json: JsonOption = False,
) -> None:
    """Measure how well a tokenizer fits some text: bytes per token, unknown tokens, and text that it loses."""
    from rich.table import Table

    from data_service.ingest.options import BuildOptions
    from data_service.tokenizers.check import check_tokenizer
    from data_service.tokenizers.load import load_tokenizer
    from launcher.app.cli.texts import print_text_loss, sample_texts
    from launcher.output import print_table

    options = validate_options(
        BuildOptions,
        **text_source_settings(text_field, encoding, delimiter),
        on_bad_bytes=on_bad_bytes,
        on_bad_records=on_bad_records,
    )
    texts = sample_texts(inputs, options, sample_mb * _MB)
    report = check_tokenizer(load_tokenizer(tokenizer, tokenizer_rules), texts)
    if as_json:
        rates = {"bytes_per_token": report.bytes_per_token, "tokens_per_word": report.tokens_per_word}
        print_json([vars(report) | rates | {"loss": report.loss.model_dump(mode="json")}])
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("sample", f"{report.lines:,} lines, {report.bytes:,} bytes, {report.tokens:,} tokens")
    table.add_row("bytes per token", f"{report.bytes_per_token:.2f}")
    table.add_row("tokens per word", f"{report.tokens_per_word:.2f}")
    table.add_row("unknown tokens", f"{report.unknown:.3%}")
    table.add_row("vocabulary that occurs", f"{report.coverage:.1%}")
    table.add_row("lines that come back exactly", f"{report.exact:.2%}")
    table.add_row("lines whose ids are stable", f"{report.stable:.2%}")
    print_table(table)
    print_text_loss(report.loss)


@group.command()
def extend(
    tokenizer: TokenizerArgument,
    new: Annotated[str, typer.Argument(help="Folder or s3:// URI for the extended tokenizer.")],
    terms: Annotated[
        str | None,
        typer.Option("--terms", metavar="FILE", help="File of words to add, one per line, in UTF-8; local or s3://."),
    ] = None,
    specials: Annotated[
        bool,
        typer.Option(
            "--specials",
            help="Add the special tokens that a decoder's tokenizer lacks for an encoder: [UNK], [PAD], [MASK]. Its "
            "begin and end tokens enclose rows.",
        ),
    ] = False,
    tokenizer_rules: TokenizerRulesOption = "agreeing",
    replace: ReplaceOption = False,
) -> None:
    """Add whole words to a vocabulary, so that each becomes one token, or add special tokens. Existing pieces keep
    their ids.

    A run with the extended tokenizer may start from a model with the old one. It then begins with the model's embedding
    rows; a new word's row is the mean of the rows of the pieces that the word was split into. Rows of new special
    tokens are newly initialised.

    Example: `maskfleet tokenizer extend bpe-50k/ bpe-medical/ --terms drugs.txt`
    """
    from data_service.tokenizers.load import load_tokenizer, load_with_all_special_tokens, save_tokenizer
    from data_service.tokenizers.vocabulary import extend_tokenizer
    from launcher.app.cli.texts import read_nonblank_lines
    from launcher.errors import OptionError

    if terms is None and not specials:
        raise OptionError("nothing to add", remedy="give --terms FILE, or --specials, or both")
    _check_no_tokenizer(new, replace)
    extended, summary = (load_with_all_special_tokens if specials else load_tokenizer)(tokenizer, tokenizer_rules), ""
    if terms is not None:
        extension = extend_tokenizer(extended, read_nonblank_lines(terms))
        extended = extension.tokenizer
        summary = f"{len(extension.added):,} pieces added ({len(extension.known):,} terms were one piece already): "
    save_tokenizer(extended, new)
    typer.echo(f"{summary}{extended.vocab_size:,} ids at {new} (hash {extended.hash[:12]})")


def _check_no_tokenizer(uri: str, replace: bool) -> None:
    """Check that no tokenizer would be overwritten without `--replace`. Corpora and runs that refer to the tokenizer
    would find another one.

    Raises:
        TokenizerError: there is a tokenizer at `uri`.
    """
    from data_service.errors import TokenizerError
    from data_service.store.open import open_store
    from data_service.tokenizers.load import holds_tokenizer

    if not replace and holds_tokenizer(open_store(uri)):
        raise TokenizerError(
            f"there is a tokenizer in {uri} already",
            remedy="choose another folder, or write over it with --replace",
        )
