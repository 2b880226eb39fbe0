"""The texts of evaluation sets, for the search for them in training text."""

from collections.abc import Iterator

from data_service.ingest.documents import read_documents
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.tasks import plan_splits
from data_service.prepare.contamination import EvaluationText
from launcher.after.tasks.examples import texts_of
from launcher.after.tasks.task import Task


def texts_of_task(task: Task) -> Iterator[EvaluationText]:
    """Yield the texts of all splits of a task but `train`. Of a retrieval task only the queries: its documents are the
    text that is searched. Raises as `Task.read`."""
    for split in task.splits:
        if split != "train":
            for column in zip(*texts_of(task.read(split)), strict=True):
                for number, text in enumerate(column):
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
