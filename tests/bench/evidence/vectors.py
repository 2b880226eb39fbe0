"""Vectors of text trained on from a checkpoint: SimCSE, and pairs with labels that exist; similarity before and after.

The pairs are a section's heading, with its document's title, and the first passage of that section.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Literal

from launcher.after.evaluate.cell import GridRecord, Measure, Results
from launcher.after.evaluate.compute_cell import compute
from launcher.after.evaluate.evaluation import plan

from data_service.store.open import open_store
from launcher.after.embed.evaluate import CellSettings
from launcher.after.evaluate.measures import Vectors
from launcher.after.finetune.pretrained import LocalModel, open_pretrained
from launcher.after.tasks.task import load_task, task_digest
from launcher.runtime.rank.initial_weights import check_start
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.record import Run

from .measuring import both
from .place import Place
from .pretraining import PAIRS, TEXTS, changed, inputs_of, trained

Method = Literal["simcse", "pairs"]
METHODS: Mapping[Method, tuple[str, tuple[str, ...]]] = {
    "simcse": ("simcse-base", TEXTS),
    "pairs": ("contrastive-base", (PAIRS,)),
}
"""By name: the recipe, and the kinds of text that it is trained on."""
SUITE = "vectors"
_DROPOUT = 0.1


def train_vectors(place: Place, family: str, seed: int, run: Run, interrupted: Event) -> None:
    """Trains by every method, and measures similarity of the result, of the checkpoint, and of untrained weights.

    Raises as `trained`.
    """
    with both(place, family, seed, run) as models:
        _measure(place, models)
    for method in METHODS:
        recipe = recipe_of_vectors(place, method, family, seed, run)
        after = trained(recipe, folder_of(place, method, family, seed), interrupted)
        with open_pretrained(after.uri) as model:
            _measure(place, [model])


def _measure(place: Place, models: Sequence[LocalModel]) -> None:
    results = Results(open_store(str(place.results)))
    works = plan(models, list(similarity_measures(place)), [0])
    results.keep_grid(GridRecord(suite=SUITE, cells=tuple(work.cell for work in works)))
    folders = {model.digest: model for model in models}
    for work in works:
        compute(work, folders[work.cell.weights], results.store.uri, place.root / "shared")


def folder_of(place: Place, method: Method, family: str, seed: int) -> Path:
    """The run of a method."""
    return place.root / "vectors" / f"{method}-{family}-{seed}"


def similarity_measures(place: Place) -> Iterator[Measure]:
    """Every STS file; vectors are pooled as the model says, and by their mean where it says nothing."""
    for file in sorted(place.tasks.glob("sts-*.yaml")):
        task = load_task(str(file))
        yield Vectors(task, CellSettings(), task_digest(task))


def recipe_of_vectors(place: Place, method: Method, family: str, seed: int, run: Run) -> Recipe:
    """The recipe of the method for the network of `run`, from its last checkpoint."""
    wanted, (recipe, kinds) = place.comparison.vectors, METHODS[method]
    model = run.recipe.model.model_dump(mode="json")
    settings: dict[str, object] = {
        "name": f"{method}-{family}-{seed}",
        "seed": seed,
        "start": run.uri,
        **inputs_of(place, place.family(family), kinds),
        "model": model | {"dropout": _DROPOUT, "attention_dropout": _DROPOUT},
        "objective.contrastive.pooling": "mean",
        "objective.contrastive.temperature": 0.05,
        "phases": [
            {"steps": wanted.steps, "length": model["max_length"], "batch": {"sequences": wanted.batch}}
        ],
        "optimizer.adamw.lr": wanted.lr,
        "schedule.warmup": wanted.steps // 10,
        "precision": "fp32",
        "microbatch": wanted.batch,
        "checkpoint": {"every": {"steps": wanted.steps}, "keep_last": 1},
        "evaluation": {"every": {"steps": wanted.steps}, "samples": 4 * wanted.batch},
        "mixing.batches": "mixed",
    }
    common = {
        key: value for key, value in place.comparison.pretraining.settings.items() if key != "microbatch"
    }
    made = changed(load(recipe), settings | common)
    check_start(made)
    return made
