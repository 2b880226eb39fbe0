"""Arguments and options that several commands share, and cheap checks of their values.

These checks run before anything is read from a network, and before imports that take seconds. The commands repeat the
checks later, and make further ones.
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from launcher.errors import OptionError, RunError

if TYPE_CHECKING:
    from pydantic import BaseModel


M = TypeVar("M", bound="BaseModel")
_URI_SCHEME_RE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a `Path` keeps only one of a URI's two slashes


BadBytes = Literal["error", "replace"]


class TextLossKind(StrEnum):  # how a tokenizer loses characters; an enum, because typer takes no list of Literal
    UNKNOWN = "unknown"
    MARKS = "marks"
    WIDTH = "width"
    JOINERS = "joiners"
    WHITE_SPACE = "white_space"
    OTHER = "other"


TokenizerRulesOption = Annotated[
    Literal["file", "class", "agreeing"],
    typer.Option(
        "--tokenizer-rules",
        help="Which rules apply if tokenizer.json (file) and the class that the tokenizer's folder names (class) treat "
        "text in different ways. By default the command fails then.",
    ),
]
AcceptLossOption = Annotated[
    list[TextLossKind] | None,
    typer.Option(
        "--accept-loss",
        help="Continue even if the tokenizer loses more than a fifth of the characters in this way. Repeatable.",
    ),
]
InputsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT",
        help="Files, folders or globs, local or in an object store (s3://, gs://, az://): .txt, .jsonl, .json (a "
        "value a line), .csv and .tsv, each also with .gz, .zst, .bz2 or .xz; .warc and .wet; .xml of Wikipedia; .tar; "
        ".mds; .parquet; .arrow, as in folders that Hugging Face datasets saves.",
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
        help="Encoding of .txt, JSON lines, CSV and TSV: utf-8, cp1252, gb18030 ... A byte order mark overrides it.",
    ),
]
DelimiterOption = Annotated[
    str | None,
    typer.Option(
        "--delimiter",
        help="Character between columns of CSV and TSV, or tab. Default: recognised from the first line.",
    ),
]
BadBytesOption = Annotated[
    BadBytes,
    typer.Option("--on-bad-bytes", help="If text is not in its encoding: stop, or replace bad bytes by U+FFFD."),
]
BadRecordsOption = Annotated[
    Literal["error", "skip"],
    typer.Option(
        "--on-bad-records",
        help="If a record has broken JSON, a missing field, a wrong type or bad bytes, or is too long: stop, or skip, "
        "count and list it.",
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="For programs: one JSON object per line, and nothing else on standard output."),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or URI (s3://, gs://, az://).")]
CHECKPOINT_HELP = "or a folder in the transformers format, local or s3://. A pair of networks: the discriminator."
"""The rest of a help text that begins with `A run,` or `Runs,`."""
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
        help="Folder or s3:// URI with the tasks' published files. Files of a task in YAML lie next to the YAML file.",
    ),
]
LicenceOption = Annotated[str | None, typer.Option("--licence", help="Licence for the model card, such as apache-2.0.")]
TokenizerArgument = Annotated[str, typer.Argument(help="The tokenizer's folder or s3:// URI.")]
CorpusTokenizerOption = Annotated[
    str | None, typer.Option("--tokenizer", metavar="URI", help="Tokenizer folder or URI. Default: the corpus's copy.")
]
CorpusArgument = Annotated[str, typer.Argument(metavar="CORPUS", help="The corpus's folder or s3:// URI.")]


def print_json(records: Iterable[Mapping[str, object]]) -> None:
    """Print one strict JSON object per line. infra/docs/records.md lists each command's keys, which never change."""
    from launcher.runtime.run.log import encode_line

    for record in records:
        typer.echo(encode_line(record), nl=False)


def validate_options(model: type[M], *, option_names: dict[str, str] | None = None, **values: object) -> M:
    """Return an instance of `model` made from a command's options.

    Args:
        option_names: option of each field whose name differs from its option's.

    Raises:
        OptionError: at least one value is invalid; the message lists each with its option.
    """
    from pydantic import ValidationError

    from launcher.runtime.recipe.document import reason_text

    try:
        return model.model_validate(values)
    except ValidationError as error:
        wrong = []
        for detail in error.errors():
            if not detail["loc"]:  # the values of several options do not go together
                wrong.append(reason_text(detail))
                continue
            field = str(detail["loc"][0])
            option = (option_names or {}).get(field, f"--{field.replace('_', '-')}")
            shown = "" if isinstance(detail["input"], dict) else f" {detail['input']}"
            wrong.append(f"{option}{shown}: {reason_text(detail)}")
    raise OptionError("; ".join(wrong), remedy="give another value; --help says what the option means")


def refuse_without_effect(option: str, others: Mapping[str, object]) -> None:
    """Raise OptionError if options that have no effect beside `option` are given: those of `others` whose value is not
    empty."""
    if given := " and ".join(name for name, value in others.items() if value):
        raise OptionError(f"beside {option}, {given} would have no effect", remedy=f"leave out {given}, or {option}")


def text_source_settings(text_field: str, encoding: str, delimiter: str | None) -> dict[str, Any]:
    """Return the build options for reading text: its field, encoding and delimiter."""
    return {"text_field": text_field, "encoding": encoding, "delimiter": delimiter_character(delimiter)}


def delimiter_character(option_value: str | None) -> str | None:
    """Return the character that --delimiter means. `tab` stands for a tab, which is hard to type in a shell."""
    return "\t" if option_value in ("tab", "\\t") else option_value


_MODEL_FILES = ("run.json", "config.json", "modules.json", "discriminator/config.json")
"""Every folder of a run or a model has one of these files."""


def require_run(uri: str) -> None:
    """Raise RunError if there is no run at `uri`, StoreError if its store cannot be read."""
    from data_service.store.open import open_store
    from launcher.runtime.run.outline import RECORD_FILE, no_run_error

    if open_store(uri).size(RECORD_FILE) is None:
        raise no_run_error(uri)


def require_new_run(uri: str) -> None:
    """Raise RunError if there is a run at `uri` already, or `uri` is not allowed for a run. Raises StoreError."""
    from launcher.runtime.run.outline import open_unused_store

    open_unused_store(uri)


def require_local_path(path: Path | None) -> Path | None:
    """Return the local path that an option gives.

    Raises:
        OptionError: the path is a URI. The error shows only its scheme, because the rest may hold a secret key.
    """
    if path is not None and (scheme := _URI_SCHEME_RE.match(str(path))):
        raise OptionError(
            f"--out is a URI ({scheme[0]}), but this command writes only to local files",
            remedy="give a local path, and copy the result from there",
        )
    return path


def require_model(source: str) -> None:
    """Check that a local `source` is a run or a model. URIs are checked when they are opened.

    Raises:
        RunError: there is no such folder on this machine, or it holds neither a run nor a model.
    """
    if "://" in source:
        return
    if not Path(source).is_dir():
        raise RunError(
            f"there is no folder {source}",
            remedy="give a run, or a folder in the transformers or SentenceTransformer format",
        )
    if not any(Path(source, name).is_file() for name in _MODEL_FILES):
        raise RunError(
            f"{source} is neither a run nor a model: it has no {_MODEL_FILES[0]} and no {_MODEL_FILES[1]}",
            remedy="give a run, or a folder in the transformers format",
        )


def require_recipe(name: str) -> None:
    """Raise RecipeError if there is no recipe of that name, or the file is not YAML."""
    from launcher.runtime.recipe.source import read_recipe

    read_recipe(name)


def require_run_or_recipe(target: str) -> None:
    """Check that `target` is a recipe or a run.

    Raises:
        RunError: `target` is neither a bundled recipe, nor a file, nor a run.
        StoreError: the store cannot be read.
    """
    from launcher.runtime.recipe.source import bundled

    if target not in bundled() and not Path(target).is_file():
        require_run(target)


def require_corpora(options: Iterable[str]) -> None:
    """Check the local corpora among [NAME=]URI[@WEIGHT] words.

    Raises:
        CorpusError: there is no corpus at a local path.
    """
    from data_service.corpus.manifest import MANIFEST_KEY
    from data_service.corpus.manifest_file import no_corpus_error
    from launcher.runtime.recipe.parts import CorpusOption

    for option in options:
        uri = CorpusOption.parse(option).uri
        if "://" not in uri and not Path(uri, MANIFEST_KEY).is_file():
            raise no_corpus_error(uri)


def require_assignments(assignments: Iterable[str]) -> None:
    """Raise RecipeError if a `--set` assignment is not KEY=VALUE, with YAML as the value."""
    from launcher.runtime.recipe.document import parse_assignment

    for assignment in assignments:
        parse_assignment(assignment)
