"""A model to evaluate: a run's checkpoint or a model's folder, which is exported or fetched only when a cell needs its
files; and whether its corpora were searched for the texts of a task, so that a figure states it.

A run's checkpoint is known by its manifest, which holds the hashes of its weights, and the recipe's model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from checkpoints.hf.folder import NETWORKS
from checkpoints.layout import CheckpointName
from checkpoints.listing import list_committed
from data_service.corpus.data_card import DataCard
from data_service.corpus.origin import IndexedSplit
from data_service.prepare.contamination import digest_of_texts
from data_service.store.base import digest
from data_service.store.open import open_store
from launcher.after.evaluate.cells import CellWork
from launcher.after.export.model_card import read_cards, run_cards
from launcher.after.finetune.pretrained import LocalModel, open_pretrained
from launcher.after.tasks.summary import texts_of_task
from launcher.after.tasks.task import Task
from launcher.errors import RunError
from launcher.runtime.recipe.timeline import recipe_after
from launcher.runtime.run.record import RECORD, Run, open_run
from launcher.runtime.run.sealed import hash_of


@dataclass(frozen=True)
class Model:
    """A model by its digest; attributes as in `LocalModel`."""

    source: str
    step: int | None
    digest: str

    @contextmanager
    def open(self) -> Iterator[LocalModel]:
        """Provide the files on this machine's disk. Raises as `open_pretrained`."""
        with open_pretrained(self.source, self.step) as found:
            yield replace(found, digest=self.digest)


def find_models(sources: Sequence[str], steps: Sequence[int] | None) -> list[Model]:
    """Return the models at `sources`: the checkpoints of runs at `steps` (None: all; empty: the newest), and folders.

    Raises the errors of `open_pretrained`, and RunError if `steps` are given but all sources are folders, or a run has
    no such checkpoint.
    """
    runs = [source for source in sources if open_store(source).size(RECORD) is not None]
    if steps != [] and not runs:
        raise RunError(f"no run among {', '.join(sources)}: folders have no steps", remedy="leave out --step")
    return [
        model
        for source in sources
        for model in (_checkpoints(source, steps) if source in runs else [_folder(source)])
    ]


def _folder(source: str) -> Model:
    with open_pretrained(source) as found:
        return Model(source, None, found.digest)


def _checkpoints(source: str, steps: Sequence[int] | None) -> Iterator[Model]:
    run = open_run(source)
    newest = {
        mark.step: mark for mark in reversed(list_committed(run.store))
    }  # the newest attempt's comes first
    wanted = sorted(newest) if steps is None else steps or sorted(newest)[-1:]
    lacking = [step for step in wanted if step not in newest]
    if lacking or not wanted:
        what = f"of step {lacking[0]}" if lacking else "yet"
        there = ", ".join(map(str, sorted(newest))) or "none"
        raise RunError(f"{source} has no checkpoint {what}", remedy=f"its checkpoints: {there}")
    yield from (Model(source, step, _digest(run, newest[step])) for step in wanted)


def _digest(run: Run, mark: CheckpointName) -> str:
    """Return a digest of everything that the files of the checkpoint's export depend on."""
    model = recipe_after(run.recipe, mark.step).model
    recipe = [model.model_dump(mode="json"), run.recipe.objective.model_dump(mode="json")]
    return hash_of([digest(run.store.get(mark.manifest)), recipe, run.record.inputs.tokenizer])


def find_searches(works: Sequence[CellWork]) -> dict[str, dict[str, bool] | None]:
    """Return, for each cell by its key, whether all corpora of its model were searched for the texts of each split but
    `train` of its task; None if the corpora are not known.

    A run's corpora say in their manifests which splits they were searched for, with a digest of the texts; a model that
    was exported from a run says it in its data cards. Raises the errors of `Task.read` and `open_run`.
    """
    models = {source: _searched_splits(source) for source in {work.cell.source for work in works}}
    known = [work for work in works if models[work.cell.source] is not None]
    tasks = {work.measure.data: work.measure.measured_task for work in known}
    digests = {data: _digests(task) for data, task in tasks.items()}
    found: dict[str, dict[str, bool] | None] = dict.fromkeys(work.cell.key for work in works)
    for work in known:
        texts = {split.digest for split in models[work.cell.source] or () if split.looked_up}
        found[work.cell.key] = {split: one in texts for split, one in digests[work.measure.data].items()}
    return found


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
