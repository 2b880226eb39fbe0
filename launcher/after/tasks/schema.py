"""The schema of a task's YAML, with the checks that its parts fit together; `task.py` loads and reads it.

A split is one file or several, each in one of these forms:

    train: SST-2/train.tsv                                        # a table, or one of the published formats
    train: [{path: mr.pos, label: positive}, {path: mr.neg, label: negative}]     # a file of texts for each class
    test: [{path: STS.input.headlines.txt, gold: STS.gs.headlines.txt}]           # labels in a separate file
    test: {corpus: corpus.jsonl, queries: queries.jsonl, qrels: qrels/test.tsv}   # retrieval
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from data_service.ingest.encodings import UTF_8, python_encoding_name
from launcher.runtime.recipe.parts import RecipeIssue

TaskKind = Literal["classification", "pair_classification", "regression", "tagging", "span", "similarity", "retrieval"]
TaskFormat = Literal["jsonl", "tsv", "csv", "parquet", "txt", "label_first", "trec", "columns", "squad", "beir"]
MetricName = Literal[
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
Truncation = Literal["longest_first", "only_first", "only_second"]  # which text of a pair is cut
TagScheme = Literal["bio", "iob1", "bioes"]
TextEncoding = Annotated[str, AfterValidator(python_encoding_name)]  # Python's name of a text encoding
SettingValue = bool | int | float | str | None  # value of a fine-tuning setting

# Kinds whose examples are texts, or pairs of texts, with one label each.
TEXT_KINDS: tuple[TaskKind, ...] = ("classification", "pair_classification", "regression", "similarity")
PAIR_KINDS: tuple[TaskKind, ...] = ("pair_classification", "similarity")  # kinds whose examples are pairs of texts
# Formats without built-in fields: the task must name the fields.
TABLE_FORMATS: tuple[TaskFormat, ...] = (
    "jsonl",
    "tsv",
    "csv",
    "parquet",
    "columns",
)
SCORED_KINDS: tuple[TaskKind, ...] = ("regression", "similarity")  # kinds whose labels are numbers
LABELLED_KINDS: tuple[TaskKind, ...] = (
    "classification",
    "pair_classification",
    "tagging",
)  # kinds whose labels are names

METRICS_BY_KIND: dict[TaskKind, tuple[MetricName, ...]] = {
    "classification": ("accuracy", "f1", "macro_f1", "matthews"),
    "pair_classification": ("accuracy", "f1", "macro_f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "similarity": ("spearman", "pearson"),
    "tagging": ("entity_f1", "accuracy", "macro_f1"),
    "span": ("answer_f1", "exact_match", "cmrc_f1", "cmrc_exact_match"),
    "retrieval": ("ndcg@10", "map@100", "mrr@10", "recall@100"),
}

FORMATS_BY_KIND: dict[TaskKind, tuple[TaskFormat, ...]] = {
    **dict.fromkeys(TEXT_KINDS, ("jsonl", "tsv", "csv", "parquet", "txt", "label_first", "trec")),
    "tagging": ("columns", "jsonl", "parquet"),
    "span": ("squad", "jsonl", "parquet"),
    "retrieval": ("beir",),
}


class TaskYamlModel(BaseModel):
    """A part of a task's YAML. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SingleLabelFile(TaskYamlModel):
    """A file whose texts all have the label `label`."""

    path: str
    label: str


class TextAndLabelFiles(TaskYamlModel):
    """A file of texts and a file of their labels or scores, line by line (SemEval's STS)."""

    path: str
    gold: str


class RetrievalFiles(TaskYamlModel):
    """The files of a retrieval task, as in BEIR: documents, queries, and judgements of relevance (qrels)."""

    corpus: str
    queries: str
    qrels: str


TaskFile = str | SingleLabelFile | TextAndLabelFiles | RetrievalFiles


class TaskFields(TaskYamlModel):
    """The places of a task's values in a row, a line or an object: names of fields, or numbers of columns from 1.

    With numbers, the file has no first line with names. The fields that a task needs follow from its kind; the formats
    `squad`, `beir`, `txt`, `label_first` and `trec` have built-in fields.
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

    def given_fields(self) -> dict[str, str | int]:
        """Return the fields that the task names."""
        return {name: place for name, place in self if place is not None}


class SplitShares(TaskYamlModel):
    """Shares of the published examples that become dev and test, for a task that is published without these splits."""

    dev: float = Field(default=0.0, ge=0, lt=1)
    test: float = Field(default=0.0, ge=0, lt=1)


TaskName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class TaskDescription(TaskYamlModel):
    """A task as its YAML describes it.

    Attributes:
        name: name of the task in results: lower case letters, digits, `.`, `_`, `-`.
        kind: kind of the examples and of the prediction.
        about: description in one line.
        published: place where the files are published.
        files: files of each split, by its name, one or several. `train`, `dev` and `test` are the usual splits; further
            ones can be measured too (MNLI's `mismatched`).
        unlabelled: names of splits that are published without labels and cannot be measured.
        held_out: shares of `train` that become `dev` and `test`, by a hash of the text, so the same on every machine.
        format: format of the files. `txt`: a text on each line. `label_first`: a label, a space, a text. `trec`:
            `LABEL:detail ...`.
        fields: places of the values in a row.
        labels: names of classes or tags, in the order of their indices.
        label_ids: whether the files hold indices into `labels` in place of names.
        skip_labels: labels whose examples are left out, as the task's authors do (MNLI's "-").
        broken_rows: `skip` leaves out, and counts, rows with too few or too many fields and questions with answers that
            are not in their context, which some published files have.
        misplaced_answers: `nearest` takes the occurrence of an answer that is nearest to its stated beginning.
        quotes: whether fields may be in quotation marks, as in RFC 4180; None: in csv, but not in tsv.
        delimiter: character between the columns of csv and tsv; None: the usual one.
        encoding: Python's name of the text files' encoding; a byte order mark overrides it.
        scheme: scheme of the files' tags. They are converted to BIO, the scheme of `labels`.
        score_range: lowest and highest score (regression, similarity).
        no_answer: whether some contexts do not answer their question (span).
        metrics: names of the metrics; the first is the main metric.
        truncation: which text of a pair is cut if both together are too long.
        finetune: default settings of a fine-tuning, each a value or a list of values to try.
    """

    name: TaskName
    kind: TaskKind
    about: str = ""
    published: str = Field(min_length=1)
    files: dict[TaskName, TaskFile | list[TaskFile]] = Field(min_length=1)
    unlabelled: list[str] = []
    held_out: SplitShares = SplitShares()
    format: TaskFormat
    fields: TaskFields = TaskFields()
    labels: list[str] = []
    label_ids: bool = False
    skip_labels: list[str] = []
    broken_rows: Literal["error", "skip"] = "error"
    misplaced_answers: Literal["error", "nearest"] = "error"
    quotes: bool | None = None
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    encoding: TextEncoding = UTF_8
    scheme: TagScheme = "bio"
    score_range: tuple[float, float] | None = None
    no_answer: bool = False
    metrics: list[MetricName] = Field(min_length=1)
    truncation: Truncation = "longest_first"
    finetune: dict[str, SettingValue | list[SettingValue]] = {}

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that can be read: those with labels, including held-out ones; `train` is first."""
        made = [name for name, share in self.held_out if share]
        named = [name for name in (*self.files, *made) if name not in self.unlabelled]
        usual = [name for name in ("train", "dev", "test") if name in named]
        return (*usual, *(name for name in named if name not in usual))

    def split_files(self, split: str) -> list[TaskFile]:
        """Return the files of a published split."""
        given = self.files[split]
        return given if isinstance(given, list) else [given]

    def split_paths(self, split: str) -> list[str]:
        """Return the paths of all files of a published split."""
        return [path for file in self.split_files(split) for path in _file_paths(file)]


def _file_paths(file: TaskFile) -> tuple[str, ...]:
    match file:
        case SingleLabelFile():
            return (file.path,)
        case TextAndLabelFiles():
            return (file.path, file.gold)
        case RetrievalFiles():
            return (file.corpus, file.queries, file.qrels)
        case _:
            return (file,)


def task_issues(task: TaskDescription) -> list[RecipeIssue]:
    """Return the contradictions between a task's settings, each of which is valid by itself."""
    return [
        *_kind_issues(task),
        *_label_issues(task),
        *_split_issues(task),
        *_field_issues(task),
        *_file_issues(task),
    ]


def _kind_issues(task: TaskDescription) -> Iterator[RecipeIssue]:
    kind, metrics = task.kind, task.metrics
    if task.format not in FORMATS_BY_KIND[kind]:
        remedy = f"use one of {', '.join(FORMATS_BY_KIND[kind])}"
        yield RecipeIssue(("format",), f"{task.format} cannot hold {kind}", remedy)
    for index, metric in enumerate(metrics):
        if metric not in METRICS_BY_KIND[kind] or metric in metrics[:index]:
            remedy = f"use one or more of {', '.join(METRICS_BY_KIND[kind])}, each once"
            yield RecipeIssue(("metrics", index), f"{metric} is not a metric of {kind}, or is listed twice", remedy)
        elif metric == "f1" and len(task.labels) != 2:
            what = f"f1 needs two labels, the second one for the positive class, but there are {len(task.labels)}"
            yield RecipeIssue(("metrics", index), what, "use macro_f1")
    for name in [name for name, wrong in _unused_setting_flags(task).items() if wrong]:
        yield RecipeIssue((name,), f"{kind} tasks have no {name}", f"leave {name} out")


def _unused_setting_flags(task: TaskDescription) -> dict[str, bool]:
    """Return, for each setting that only some kinds of tasks have, whether this task sets it against its kind."""
    return {
        "no_answer": task.no_answer and task.kind != "span",
        "labels": bool(task.labels) and task.kind not in LABELLED_KINDS,
        "score_range": task.score_range is not None and task.kind not in SCORED_KINDS,
    }


def _label_issues(task: TaskDescription) -> Iterator[RecipeIssue]:
    if task.kind in LABELLED_KINDS and len(task.labels) < 2:
        yield RecipeIssue(("labels",), f"{task.kind} needs at least two labels", "list them in `labels`")
    for index, label in enumerate(task.labels):
        if label in task.labels[:index] or label in task.skip_labels:
            what = f"the label {label!r} occurs twice in labels, or also in skip_labels"
            yield RecipeIssue(("labels", index), what, "keep one")
    if task.score_range is not None and not task.score_range[0] < task.score_range[1]:
        yield RecipeIssue(("score_range",), "the lowest score is not less than the highest", "swap them")


def _split_issues(task: TaskDescription) -> Iterator[RecipeIssue]:
    made = [name for name, share in task.held_out if share]
    if made and ("train" not in task.files or task.kind == "retrieval"):
        yield RecipeIssue(("held_out",), "there is no split train that can be divided", "leave held_out out")
    for name in made:
        if name in task.files:
            yield RecipeIssue(("held_out", name), f"the split {name} is in files and in held_out", "leave one out")
    if task.held_out.dev + task.held_out.test >= 1:
        yield RecipeIssue(("held_out",), "nothing is left of train", "hold out smaller shares")
    for index, name in enumerate(task.unlabelled):
        if name not in task.files:
            remedy = f"files has {', '.join(task.files)}"
            yield RecipeIssue(("unlabelled", index), f"{name} is not a split in files", remedy)
    if not task.splits:
        yield RecipeIssue(("unlabelled",), "no split has labels", "add a split with labels to files")


def _field_issues(task: TaskDescription) -> Iterator[RecipeIssue]:
    given = task.fields.given_fields()
    if task.format not in TABLE_FORMATS:
        if given:
            yield RecipeIssue(("fields",), f"format {task.format} has built-in fields", "leave fields out")
        return
    for name in _required_fields(task):
        if name not in given:
            remedy = "set it to the field's name, or to the column's number in a table without names"
            yield RecipeIssue(("fields",), f"no field {name!r}, which {task.kind} needs", remedy)
    numbers = [place for place in given.values() if isinstance(place, int)]
    may_be_numbers, must_be_numbers = task.format in ("tsv", "csv", "columns"), task.format == "columns"
    mixed = numbers and (len(numbers) < len(given) or not may_be_numbers)
    if mixed or min(numbers, default=1) < 1 or (must_be_numbers and len(numbers) < len(given)):
        what = f"{', '.join(map(str, given.values()))} do not name fields of {task.format}"
        remedy = "use only names; in tsv and csv only names, or only numbers from 1; in columns only numbers from 1"
        yield RecipeIssue(("fields",), what, remedy)


def _required_fields(task: TaskDescription) -> tuple[str, ...]:
    """Return the fields that every row must have."""
    match task.kind:
        case "tagging":
            return ("words", "tags")
        case "span":
            return ("id", "question", "context", "answers")
        case "retrieval":
            return ()
        case _:
            files = [file for split in task.files for file in task.split_files(split)]
            apart = any(isinstance(file, SingleLabelFile | TextAndLabelFiles) for file in files)
            return (
                "first",
                *(("second",) if task.kind in PAIR_KINDS else ()),
                *(() if apart else ("label",)),
            )


def _file_issues(task: TaskDescription) -> Iterator[RecipeIssue]:
    for split, given in task.files.items():
        for index, file in enumerate(task.split_files(split)):
            if reason := _file_problem(task, file):
                path = ("files", split, index) if isinstance(given, list) else ("files", split)
                yield RecipeIssue(path, *reason)
        if not task.split_files(split):
            yield RecipeIssue(("files", split), "no file", "name a file, or leave the split out")


def _file_problem(task: TaskDescription, file: TaskFile) -> tuple[str, str] | None:
    """Return the problem of a file and its remedy; None if the file fits the task."""
    if isinstance(file, RetrievalFiles) != (task.kind == "retrieval"):
        remedy = "write {corpus, queries, qrels} for retrieval, and paths for other kinds"
        return f"not a file of {task.kind}", remedy
    if isinstance(file, SingleLabelFile) and file.label not in task.labels:
        return f"the label {file.label!r} is not one of labels", "use one of labels, or add it there"
    if isinstance(file, TextAndLabelFiles):
        named = any(isinstance(place, str) for place in task.fields.given_fields().values())
        if named or task.format not in ("tsv", "txt"):
            return "gold (labels) needs texts without column names", "use format txt, or tsv with columns by number"
    return None
