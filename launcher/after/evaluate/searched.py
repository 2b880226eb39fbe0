"""Whether the corpora of a model were searched for the texts of a task, so that a figure states it.

A run's corpora say in their manifests which splits they were searched for, with a digest of the texts; a model that was
exported from a run says it in its data cards. What is found is kept with the results: data, corpora and runs may be
deleted later.
"""

from collections.abc import Mapping, Sequence

from checkpoints.hf.folder import PARTS
from data_service.corpus.data_card import DataCard
from data_service.corpus.origin import IndexedSplit
from data_service.prepare.contamination import digest_of_texts
from data_service.store.open import open_store
from launcher.after.evaluate.cell import Measure, Results
from launcher.after.evaluate.evaluation import KnownModel
from launcher.after.evaluate.measures import Finetuning, FrozenMeasure, Vectors
from launcher.after.export.data_cards import cards_of, read_cards
from launcher.after.tasks.task import Task, load_task
from launcher.after.tasks.texts import texts_of_task
from launcher.observe.inspect.report.task_table import TableRow
from launcher.runtime.run.record import RECORD, open_run
from launcher.runtime.run.sealed import Sealed, keep, name_of, read_all


class SearchedTask(Sealed):
    """Whether the corpora of a model were searched for the texts of a task.

    Attributes:
        weights, data: digests of the model and of the task.
        splits: whether they were, for each split but `train`.
    """

    weights: str
    data: str
    splits: dict[str, bool]

    @property
    def path(self) -> str:
        return _path(self.weights, self.data)


def keep_searched(results: Results, models: Sequence[KnownModel], measures: Sequence[Measure]) -> None:
    """Record with the results what the corpora of the models were searched for, unless they hold it already.

    A model whose corpora are not known gets no record. Raises the errors of `Task.read`, of `open_run`, and StoreError.
    """
    places = {_path(model.digest, measure.data) for model in models for measure in measures}
    recorded = {one.path for one in read_all(results.store, sorted(places), SearchedTask)}
    splits: dict[str, dict[str, str]] = {}
    for model in models:
        missing = {m.data: m for m in measures if _path(model.digest, m.data) not in recorded}
        found = _searched(model.source) if missing else None
        texts = {split.digest for split in found or () if split.looked_up}
        for data, measure in missing.items() if found is not None else ():
            digests = splits[data] if data in splits else splits.setdefault(data, _digests(measure))
            stated = {split: digest in texts for split, digest in digests.items()}
            keep(results.store, SearchedTask(weights=model.digest, data=data, splits=stated))


def with_searched(results: Results, rows: Sequence[TableRow]) -> list[TableRow]:
    """Return the rows with what is recorded of their models. Raises StoreError; RunError as `read`."""
    places = dict.fromkeys(_path(row.weights, row.data) for row in rows)
    found = {one.path: one.splits for one in read_all(results.store, places, SearchedTask)}
    return [row.model_copy(update={"searched": found.get(_path(row.weights, row.data))}) for row in rows]


def _path(weights: str, data: str) -> str:
    return f"searched/{name_of([weights, data])}.json"


def _searched(source: str) -> Sequence[IndexedSplit] | None:
    """Return the splits that all corpora of a model were searched for; None if that is not known."""
    cards = _cards(source)
    if cards is None or None in cards.values():
        return None
    first, *others = (card.searched for card in cards.values() if card is not None)
    return [split for split in first if all(split in other for other in others)]


def _cards(source: str) -> Mapping[str, DataCard | None] | None:
    store = open_store(source)
    if store.size(RECORD) is not None:
        return cards_of(open_run(source))
    found = (read_cards(place) for place in (store, store.at(PARTS[1])))
    return next((cards for cards in found if cards), None)


def _digests(measure: Measure) -> dict[str, str]:
    """Return the digest of the texts of each split but `train` of the measure's task."""
    task = _task(measure)
    texts: dict[str, list[str]] = {}
    for text in texts_of_task(task):
        texts.setdefault(text.split.removeprefix(f"{task.name}/"), []).append(text.text)
    return {split: digest_of_texts(found) for split, found in texts.items()}


def _task(measure: Measure) -> Task:
    match measure:
        case Finetuning() | Vectors():
            return measure.wanted
        case FrozenMeasure():
            named = measure.wanted.named_task
            assert named is not None, "a suite's measures have a task"
            assert named.task is not None, "named by it"
            return load_task(named.task, named.data)
    raise TypeError(f"no measure of a task: {measure!r}")
