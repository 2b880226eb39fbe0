"""Arguments and options that several commands share."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from launcher.errors import OptionError

if TYPE_CHECKING:
    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")


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
EncodingOption = Annotated[
    str,
    typer.Option(
        "--encoding",
        help="Of .txt, JSON lines, CSV and TSV: utf-8, cp1252, gb18030 ... A byte order mark says another by itself.",
    ),
]
DelimiterOption = Annotated[
    str | None,
    typer.Option(
        "--delimiter",
        help="Between columns of CSV and TSV: a character, or tab. Default: found by the first line.",
    ),
]
BadBytesOption = Annotated[
    BadBytes,
    typer.Option(
        "--on-bad-bytes", help="Text that is not in its encoding: stop, or put U+FFFD in its place."
    ),
]
BadRecordsOption = Annotated[
    BadRecords,
    typer.Option(
        "--on-bad-records",
        help="Broken JSON, a missing field, another type, bad bytes, too long: stop, or leave out, count and list.",
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="For programs: a JSON object a line, and nothing else on standard output."),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or s3:// URI.")]
CHECKPOINT_HELP = (
    "or a folder in the transformers format, local or s3://; of a pair of networks the discriminator."
)
"""After what says of runs how many."""
CheckpointArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help=f"A run, {CHECKPOINT_HELP}")]
StepOption = Annotated[
    int | None,
    typer.Option("--step", help="The run's checkpoint of this step; default: the newest good one."),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="FOLDER",
        help="Folder or s3:// URI that holds the tasks' published files. Those of a YAML file are beside it.",
    ),
]
ScratchOption = Annotated[
    Path | None,
    typer.Option(
        "--scratch",
        help="Folder on this machine that keeps checkpoints, so that the same command, killed, goes on.",
    ),
]
CorpusArgument = Annotated[str, typer.Argument(metavar="CORPUS", help="The corpus's folder or s3:// URI.")]


def print_json(records: Iterable[Mapping[str, object]]) -> None:
    """One strict JSON object a line. infra/docs/records.md says which keys each command has; they stay."""
    from launcher.runtime.run.log import encode

    for record in records:
        typer.echo(encode(record), nl=False)


def settings(model: type[M], *, called: dict[str, str] | None = None, **values: object) -> M:
    """`model` of a command's options. `called`: the options of fields that are not named like them.

    Raises OptionError: values that cannot be, each with its option.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(values)
    except ValidationError as error:
        wrong = []
        for detail in error.errors():
            field = str(detail["loc"][0]) if detail["loc"] else ""
            option = (called or {}).get(field, f"--{field.replace('_', '-')}")
            wrong.append(f"{option} {detail['input']}: {detail['msg'][:1].lower()}{detail['msg'][1:]}")
    raise OptionError("; ".join(wrong), remedy="give another value; --help says what the option means")


def delimiter_character(given: str | None) -> str | None:
    """The character that --delimiter means: a shell's user cannot type a tab easily."""
    return "\t" if given in ("tab", "\\t") else given
