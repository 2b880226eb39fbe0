"""Arguments and options that several commands share."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated

import typer


class BadBytes(StrEnum):
    ERROR = "error"
    REPLACE = "replace"


InputsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT",
        help="Files, folders or globs, local or s3://: .txt, .jsonl (.gz, .zst) and .parquet.",
    ),
]
TextFieldOption = Annotated[
    str, typer.Option("--text-field", help="Field of a JSON line, or Parquet column, that holds the text.")
]
BadBytesOption = Annotated[
    BadBytes, typer.Option("--on-bad-bytes", help="Text that is not UTF-8: stop, or put U+FFFD in its place.")
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="For programs: a JSON object a line, and nothing else on standard output."),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or s3:// URI.")]
CorpusArgument = Annotated[str, typer.Argument(metavar="CORPUS", help="The corpus's folder or s3:// URI.")]


def print_json(records: Iterable[Mapping[str, object]]) -> None:
    """One strict JSON object a line. launcher/README.md says which keys each command has; they stay."""
    from launcher.metrics import encode

    for record in records:
        typer.echo(encode(record), nl=False)
