"""The texts of evaluation sets, for the search for them in training text."""

from collections.abc import Iterator

from data_service.ingest.documents import read_documents
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.tasks import plan_splits
from data_service.prepare.contamination import EvaluationText
from launcher.after.tasks.examples import Examples, Questions, Retrieval, Sentences, Tagged
from launcher.after.tasks.task import Task


def texts_of_task(task: Task) -> Iterator[EvaluationText]:
    """Yield the texts of all splits of a task but `train`. Of a retrieval task only the queries: its documents are the
    text that is searched. Raises as `Task.read`."""
    for split in task.splits:
        if split != "train":
            for number, text in _texts(task.read(split)):
                yield EvaluationText(f"{task.name}/{split}", number, text)


def texts_of_file(path: str, field: str) -> Iterator[EvaluationText]:
    """Yield the documents of files that a corpus build reads.

    `field`: field of a JSON line, or column of a table, that holds the text. Raises InputError, StoreError.
    """
    options = BuildOptions(text_field=field)
    number = 0
    for split in plan_splits(list_inputs([path]).files, options):
        for found in read_documents(split, options):
            yield EvaluationText(path, number, found.text)
            number += 1


def _texts(examples: Examples) -> Iterator[tuple[int, str]]:
    """Yield the number of an example and each of its texts."""
    match examples:
        case Sentences():
            for columns in (examples.first, examples.second or ()):
                yield from enumerate(columns)
        case Tagged():
            yield from ((number, " ".join(words)) for number, words in enumerate(examples.words))
        case Questions():
            for columns in (examples.questions, examples.contexts):
                yield from enumerate(columns)
        case Retrieval():
            yield from enumerate(examples.queries.values())
