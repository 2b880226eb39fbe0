"""Arguments and options that several commands share."""

from enum import StrEnum
from typing import Annotated

import typer


class BadBytes(StrEnum):
    ERROR = "error"
    REPLACE = "replace"


class BadRecords(StrEnum):
    ERROR = "error"
    SKIP = "skip"


InputsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT",
        help="Files, folders or globs, local or s3://: .txt, .jsonl, .json (a value a line), .csv and .tsv, each also "
        "with .gz or .zst; .parquet; .arrow, as in folders that Hugging Face datasets saves.",
    ),
]
TextFieldOption = Annotated[
    str,
    typer.Option("--text-field", help="Field of a JSON line, or column of a table, that holds the text."),
]
BadBytesOption = Annotated[
    BadBytes, typer.Option("--on-bad-bytes", help="Text that is not UTF-8: stop, or put U+FFFD in its place.")
]
BadRecordsOption = Annotated[
    BadRecords,
    typer.Option(
        "--on-bad-records",
        help="Broken JSON, a missing field, another type, bad bytes, too long: stop, or leave out, count and list.",
    ),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or s3:// URI.")]
CorpusArgument = Annotated[str, typer.Argument(metavar="CORPUS", help="The corpus's folder or s3:// URI.")]
