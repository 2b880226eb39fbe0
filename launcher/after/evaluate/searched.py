"""Whether the corpora of a model were searched for the texts of a task, so that a figure states it.

A run's corpora say in their manifests which splits they were searched for, with a digest of the texts; a model that was
exported from a run says it in its data cards.
"""

from collections.abc import Mapping, Sequence

from checkpoints.hf.folder import NETWORKS
from data_service.corpus.data_card import DataCard
from data_service.corpus.origin import IndexedSplit
from data_service.prepare.contamination import digest_of_texts
from data_service.store.open import open_store
from launcher.after.evaluate.cells import Measure
from launcher.after.export.data_cards import read_cards, run_cards
from launcher.after.tasks.task import Task
from launcher.after.tasks.texts import texts_of_task
from launcher.runtime.run.record import RECORD, open_run


class Searches:
    """What the corpora of models were searched for. Each corpus and each task is read once."""

    def __init__(self) -> None:
        self._models: dict[str, Sequence[IndexedSplit] | None] = {}
        self._tasks: dict[str, dict[str, str]] = {}

    def find(self, source: str, measure: Measure) -> dict[str, bool] | None:
        """Return, for each split but `train` of the measure's task, whether all corpora of the model at `source` were
        searched for its texts; None if its corpora are not known. Raises the errors of `Task.read` and `open_run`."""
        if source not in self._models:
            self._models[source] = _searched_splits(source)
        found = self._models[source]
        if found is None:
            return None
        if measure.data not in self._tasks:
            self._tasks[measure.data] = _digests(measure.measured_task)
        texts = {split.digest for split in found if split.looked_up}
        return {split: digest in texts for split, digest in self._tasks[measure.data].items()}


def _searched_splits(source: str) -> Sequence[IndexedSplit] | None:
    """Return the splits that all corpora of a model were searched for; None if that is not known."""
    cards = _cards(source)
    if cards is None or None in cards.values():
        return None
    first, *others = (card.searched for card in cards.values() if card is not None)
    return [split for split in first if all(split in other for other in others)]


def _cards(source: str) -> Mapping[str, DataCard | None] | None:
    store = open_store(source)
    if store.size(RECORD) is not None:
        return run_cards(open_run(source))
    found = (read_cards(place) for place in (store, store.at(NETWORKS[1])))
    return next((cards for cards in found if cards), None)


def _digests(task: Task) -> dict[str, str]:
    """Return the digest of the texts of each split of a task but `train`."""
    texts: dict[str, list[str]] = {}
    for text in texts_of_task(task):
        texts.setdefault(text.split.removeprefix(f"{task.name}/"), []).append(text.text)
    return {split: digest_of_texts(found) for split, found in texts.items()}
