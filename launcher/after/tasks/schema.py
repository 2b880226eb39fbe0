"""What a task's YAML may say, and which of its parts contradict each other; `task.py` loads and reads it.

A split is one file or several, each in one of these forms:

    train: SST-2/train.tsv                                        # a table, or one of the published formats
    train: [{path: mr.pos, label: positive}, {path: mr.neg, label: negative}]     # a file of texts for each class
    test: [{path: STS.input.headlines.txt, gold: STS.gs.headlines.txt}]           # labels in a file of their own
    test: {corpus: corpus.jsonl, queries: queries.jsonl, qrels: qrels/test.tsv}   # retrieval
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from data_service.ingest.encodings import UTF_8, encoding_name
from launcher.runtime.recipe.parts import RecipeIssue

Kind = Literal[
    "classification", "pair_classification", "regression", "tagging", "span", "similarity", "retrieval"
]
Format = Literal["jsonl", "tsv", "csv", "parquet", "txt", "label_first", "trec", "columns", "squad", "beir"]
Metric = Literal[
    "accuracy",
    "f1",
    "macro_f1",
    "matthews",
    "pearson",
    "spearman",
    "entity_f1",
    "exact_match",
    "answer_f1",
    "cmrc_exact_match",
    "cmrc_f1",
    "ndcg@10",
    "map@100",
    "mrr@10",
    "recall@100",
]
Truncation = Literal["longest_first", "only_first", "only_second"]
Scheme = Literal["bio", "iob1", "bioes"]
TextEncoding = Annotated[str, AfterValidator(encoding_name)]
Setting = bool | int | float | str | None

TEXTS: tuple[Kind, ...] = ("classification", "pair_classification", "regression", "similarity")
PAIRS: tuple[Kind, ...] = ("pair_classification", "similarity")
TABLES: tuple[Format, ...] = ("jsonl", "tsv", "csv", "parquet", "columns")  # whose fields a task names
SCORED: tuple[Kind, ...] = ("regression", "similarity")  # labels are numbers
LABELLED: tuple[Kind, ...] = ("classification", "pair_classification", "tagging")  # labels are names

METRICS: dict[Kind, tuple[Metric, ...]] = {
    "classification": ("accuracy", "f1", "macro_f1", "matthews"),
    "pair_classification": ("accuracy", "f1", "macro_f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "similarity": ("spearman", "pearson"),
    "tagging": ("entity_f1", "accuracy", "macro_f1"),
    "span": ("answer_f1", "exact_match", "cmrc_f1", "cmrc_exact_match"),
    "retrieval": ("ndcg@10", "map@100", "mrr@10", "recall@100"),
}

FORMATS: dict[Kind, tuple[Format, ...]] = {
    **dict.fromkeys(TEXTS, ("jsonl", "tsv", "csv", "parquet", "txt", "label_first", "trec")),
    "tagging": ("columns", "jsonl", "parquet"),
    "span": ("squad", "jsonl", "parquet"),
    "retrieval": ("beir",),
}


class TaskPart(BaseModel):
    """A part of a task's YAML: other keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OneClass(TaskPart):
    """A file whose texts all have one label."""

    path: str
    label: str


class WithGold(TaskPart):
    """Texts in one file, their labels or scores in another, line by line (SemEval's STS)."""

    path: str
    gold: str


class Judged(TaskPart):
    """Retrieval as BEIR has it: documents, queries, and which are relevant to which (qrels)."""

    corpus: str
    queries: str
    qrels: str


File = str | OneClass | WithGold | Judged


class Fields(TaskPart):
    """Where in a row, a line or an object each thing is: a field's name, or a column's number from 1.

    Numbers mean that the file has no first line with names. Which fields a task needs follows from its kind; the
    formats `squad`, `beir`, `txt`, `label_first` and `trec` have them built in.
    """

    first: str | int | None = None
    second: str | int | None = None
    label: str | int | None = None
    words: str | int | None = None
    tags: str | int | None = None
    id: str | int | None = None
    question: str | int | None = None
    context: str | int | None = None
    answers: str | int | None = None

    def named(self) -> dict[str, str | int]:
        """Return the fields that are given."""
        return {name: place for name, place in self if place is not None}


class Shares(TaskPart):
    """Shares of the published examples of which dev and test are made, where a task is published in one piece."""

    dev: float = Field(default=0.0, ge=0, lt=1)
    test: float = Field(default=0.0, ge=0, lt=1)


Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class Description(TaskPart):
    """A task as its YAML describes it.

    Attributes:
        name: for people and results: lower case letters, digits, `.`, `_`, `-`.
        kind: what the examples are and what is predicted.
        about: one line for people.
        published: where the files can be had.
        files: splits by name, each one file or several; `train`, `dev` and `test` are the usual ones, and further ones
            may be measured too (MNLI's `mismatched`).
        unlabelled: splits that are published without labels, and so cannot be measured.
        held_out: shares of `train` that are made `dev` and `test`: by a hash of the text, so the same on every machine.
        format: of the files. `txt`: a text a line. `label_first`: a label, a space, a text. `trec`: `LABEL:detail ...`.
        fields: where things are in a row.
        labels: names of classes or tags, in the order of their indices.
        label_ids: the files hold indices into `labels` in place of names.
        skip_labels: examples with one of these in place of a label are left out, as the authors do.
        broken_rows: `skip` leaves out, and counts, rows with too few or too many fields and answers that are not in
            their context, which some published files have.
        misplaced_answers: `nearest` takes the occurrence nearest to where an answer is said to begin.
        quotes: fields in quotation marks as RFC 4180 has them; None: in csv, not in tsv.
        delimiter: the character between the columns of csv and tsv; None: the usual one or, where that does not give
            the columns of `fields` by name, another that does.
        encoding: of text files, as Python names it; a byte order mark says it, too.
        scheme: of the files' tags. They are converted to BIO, in which `labels` are given.
        score_range: least and greatest score (regression, similarity).
        no_answer: some questions have no answer in their context (span).
        metrics: the first is the task's main one.
        truncation: which text of a pair is cut if both are too long together.
        finetune: defaults of a fine-tuning, each a value or a list of values to try.
        after: the task whose fine-tuned model this one starts from, as its papers did.
    """

    name: Name
    kind: Kind
    about: str = ""
    published: str = Field(min_length=1)
    files: dict[Name, File | list[File]] = Field(min_length=1)
    unlabelled: list[str] = []
    held_out: Shares = Shares()
    format: Format
    fields: Fields = Fields()
    labels: list[str] = []
    label_ids: bool = False
    skip_labels: list[str] = []
    broken_rows: Literal["error", "skip"] = "error"
    misplaced_answers: Literal["error", "nearest"] = "error"
    quotes: bool | None = None
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    encoding: TextEncoding = UTF_8
    scheme: Scheme = "bio"
    score_range: tuple[float, float] | None = None
    no_answer: bool = False
    metrics: list[Metric] = Field(min_length=1)
    truncation: Truncation = "longest_first"
    finetune: dict[str, Setting | list[Setting]] = {}
    after: Name | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """Those that can be read: with labels, held out ones included, `train` first."""
        made = [name for name, share in self.held_out if share]
        named = [name for name in (*self.files, *made) if name not in self.unlabelled]
        usual = [name for name in ("train", "dev", "test") if name in named]
        return (*usual, *(name for name in named if name not in usual))

    def sources(self, split: str) -> list[File]:
        """Return the files of a published split."""
        given = self.files[split]
        return given if isinstance(given, list) else [given]

    def paths(self, split: str) -> list[str]:
        """Of all files of a published split."""
        return [path for file in self.sources(split) for path in _paths(file)]


def _paths(file: File) -> tuple[str, ...]:
    match file:
        case OneClass():
            return (file.path,)
        case WithGold():
            return (file.path, file.gold)
        case Judged():
            return (file.corpus, file.queries, file.qrels)
        case _:
            return (file,)


def impossible(task: Description) -> list[RecipeIssue]:
    """Return all that is wrong with a task whose single values are valid."""
    return [*_kind(task), *_labels(task), *_splits(task), *_fields(task), *_files(task)]


def _kind(task: Description) -> Iterator[RecipeIssue]:
    if task.format not in FORMATS[task.kind]:
        known = ", ".join(FORMATS[task.kind])
        yield RecipeIssue(("format",), f"{task.format} does not hold {task.kind}", f"use one of {known}")
    for index, metric in enumerate(task.metrics):
        if metric not in METRICS[task.kind]:
            known = ", ".join(METRICS[task.kind])
            yield RecipeIssue(
                ("metrics", index), f"{metric} is no metric of {task.kind}", f"use some of {known}"
            )
        elif metric in task.metrics[:index]:
            yield RecipeIssue(("metrics", index), f"{metric} is given twice", "keep one")
        elif metric == "f1" and len(task.labels) != 2:
            what = f"f1 is of two labels, the second being the positive one, not of {len(task.labels)}"
            yield RecipeIssue(("metrics", index), what, "use macro_f1")
    if task.after == task.name:
        yield RecipeIssue(
            ("after",), "a task cannot start from itself", "name another task, or leave after out"
        )
    if task.no_answer and task.kind != "span":
        yield RecipeIssue(("no_answer",), f"{task.kind} has no answers", "leave no_answer out")


def _labels(task: Description) -> Iterator[RecipeIssue]:
    if task.kind in LABELLED and len(task.labels) < 2:
        yield RecipeIssue(("labels",), f"{task.kind} needs at least two labels", "list them in `labels`")
    if task.kind not in LABELLED and task.labels:
        yield RecipeIssue(("labels",), f"{task.kind} has no labels", "leave labels out")
    for index, label in enumerate(task.labels):
        if label in task.labels[:index]:
            yield RecipeIssue(("labels", index), f"the label {label!r} is given twice", "keep one")
        if label in task.skip_labels:
            what = f"the label {label!r} is in skip_labels, too"
            yield RecipeIssue(("labels", index), what, "leave it out of one of the two")
    if task.score_range is None:
        return
    if task.kind not in SCORED:
        yield RecipeIssue(("score_range",), f"{task.kind} has no scores", "leave score_range out")
    elif not task.score_range[0] < task.score_range[1]:
        yield RecipeIssue(
            ("score_range",), "the first is not less than the second", "give the least, the greatest"
        )


def _splits(task: Description) -> Iterator[RecipeIssue]:
    made = [name for name, share in task.held_out if share]
    if made and "train" not in task.files:
        yield RecipeIssue(
            ("held_out",), "it takes from the split train, which files lacks", "name train in files"
        )
    if made and task.kind == "retrieval":
        yield RecipeIssue(("held_out",), "retrieval cannot be divided", "leave held_out out")
    for name in made:
        if name in task.files:
            what = f"the split {name} is in files, too"
            yield RecipeIssue(("held_out", name), what, "leave it out of one of the two")
    if task.held_out.dev + task.held_out.test >= 1:
        yield RecipeIssue(("held_out",), "nothing is left of train", "hold out smaller shares")
    for index, name in enumerate(task.unlabelled):
        if name not in task.files:
            what = f"{name} is no split of files"
            yield RecipeIssue(("unlabelled", index), what, f"files has {', '.join(task.files)}")
    if not task.splits:
        yield RecipeIssue(("unlabelled",), "no split is left that has labels", "a task needs one")


def _fields(task: Description) -> Iterator[RecipeIssue]:
    given = task.fields.named()
    if task.format not in TABLES:
        if given:
            yield RecipeIssue(("fields",), f"format {task.format} has fields of its own", "leave fields out")
        return
    for name in _needed(task):
        if name not in given:
            what = f"no field {name!r}, which {task.kind} needs"
            yield RecipeIssue(
                ("fields",), what, "give its name, or in a table without names its column's number"
            )
    numbers = [name for name, place in given.items() if isinstance(place, int)]
    may_have_numbers = task.format in ("tsv", "csv", "columns")
    if numbers and (len(numbers) < len(given) or not may_have_numbers):
        what = "some are numbers" if may_have_numbers else f"numbers do not name fields of {task.format}"
        yield RecipeIssue(
            ("fields",), what, "give names throughout, or in tsv, csv and columns numbers throughout"
        )
    if task.format == "columns" and len(numbers) < len(given):
        yield RecipeIssue(("fields",), "the fields of columns are numbers", "number the columns from 1")
    for name in numbers:
        if int(given[name]) < 1:
            yield RecipeIssue(
                ("fields", name), f"there is no column {given[name]}", "number the columns from 1"
            )


def _needed(task: Description) -> tuple[str, ...]:
    """Fields that every row must have."""
    match task.kind:
        case "tagging":
            return ("words", "tags")
        case "span":
            return ("id", "question", "context", "answers")
        case "retrieval":
            return ()
        case _:
            files = [file for split in task.files for file in task.sources(split)]
            apart = any(isinstance(file, OneClass | WithGold) for file in files)
            return ("first", *(("second",) if task.kind in PAIRS else ()), *(() if apart else ("label",)))


def _files(task: Description) -> Iterator[RecipeIssue]:
    for split, given in task.files.items():
        for index, file in enumerate(task.sources(split)):
            path = ("files", split, index) if isinstance(given, list) else ("files", split)
            if reason := _unfit(task, file):
                yield RecipeIssue(path, *reason)
        if not task.sources(split):
            yield RecipeIssue(("files", split), "no file", "name one, or leave the split out")


def _unfit(task: Description, file: File) -> tuple[str, str] | None:
    """RecipeIssue and remedy of one file."""
    if isinstance(file, Judged) != (task.kind == "retrieval"):
        remedy = "retrieval has {corpus, queries, qrels}, other kinds have paths"
        return f"not a file of {task.kind}", remedy
    if isinstance(file, OneClass):
        if task.kind not in ("classification", "pair_classification"):
            return f"{task.kind} has no files of one label", "give a path"
        if file.label not in task.labels:
            return f"the label {file.label!r} is not one of labels", "use one of labels, or add it there"
    if isinstance(file, WithGold):
        named = any(isinstance(place, str) for place in task.fields.named().values())
        if named or task.format not in ("tsv", "txt"):
            return "gold goes with lines", "use format txt, or tsv with columns by number"
    return None
