"""Tokenizers, corpora and runs: what `maskfleet tokenizer train`, `corpus build`, `init` and `train` do."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

from checkpoints.listing import committed
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions, PairFields
from data_service.store.open import open_store
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
from launcher.app.cli.texts import sample_texts
from launcher.errors import RunError
from launcher.runtime.cluster.ending import train
from launcher.runtime.recipe.load import load, reload
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.tiny import tiny
from launcher.runtime.run.create import create_run, reconcile
from launcher.runtime.run.record import RECORD, Run, open_run

from .place import Place
from .settings import Family

TEXTS, PAIRS = ("technical", "reviews"), "pairs"
_TRIES, _PAUSE_S = 5, 20.0  # starts without a new checkpoint; between two starts


def prepare(place: Place, family: Family) -> None:
    """The family's tokenizer and its corpora; what is there already stays."""
    folder, wanted = place.vocabulary(family), place.comparison
    if not (folder / "ready").exists():
        texts = [str(place.text / kind) for kind in TEXTS]
        uncased = family.tokenizer == "wordpiece"
        options = TokenizerOptions(lowercase=uncased, strip_marks=uncased, specials=family.specials)
        sample = sample_texts(texts, BuildOptions(), wanted.sample)
        tokenizer = train_tokenizer(family.tokenizer, sample, wanted.vocabulary, options)
        save_tokenizer(tokenizer, str(folder / "tokenizer"))
        for kind in (*TEXTS, PAIRS):
            _build(place.text / kind, folder, wanted.heldout, PairFields() if kind == PAIRS else None)
        (folder / "ready").touch()


def _build(text: Path, folder: Path, heldout: float, pairs: PairFields | None) -> None:
    options = BuildOptions(heldout_fraction=heldout, pairs=pairs)
    tokenizer, corpus = str(folder / "tokenizer"), str(folder / text.name)
    build_corpus([str(text)], corpus, tokenizer, options, lambda progress: None)


def recipe_of(place: Place, name: str, seed: int) -> Recipe:
    """The small form of the family's recipe at the comparison's tokens, with its rows, batches and schedule."""
    family, wanted = place.family(name), place.comparison.pretraining
    recipe = tiny(load(family.recipe))
    every = {"steps": wanted.steps // wanted.points}
    batch, short = {"tokens": wanted.batch}, round(wanted.steps * wanted.short.share)
    settings: dict[str, object] = {
        "name": f"{name}-{seed}",
        "seed": seed,
        **inputs_of(place, family, TEXTS),
        "model.max_length": wanted.length,
        "phases": [
            {"steps": short, "length": wanted.short.length, "batch": batch},
            {"steps": wanted.steps - short, "length": wanted.length, "batch": batch},
        ],
        "schedule.warmup": round(wanted.steps * wanted.warmup),
        "checkpoint": {"every": every, "keep_last": 1, "keep_every": every},
        "evaluation.every": {"steps": max(1, wanted.steps // wanted.points // 2)},
    }
    return changed(recipe, settings | wanted.settings | family.settings)


def inputs_of(place: Place, family: Family, kinds: Iterable[str]) -> dict[str, object]:
    """The settings of a recipe that say what is trained on: several kinds of text have the comparison's weights."""
    folder, wanted = place.vocabulary(family), place.comparison
    sources = {
        kind: {"uri": str(folder / kind), "weight": wanted.weights.get(kind, "auto")} for kind in kinds
    }
    return {
        "corpus": {"sources": sources, "heldout": {"fraction": wanted.heldout}},
        "tokenizer.uri": str(folder / "tokenizer"),
    }


def changed(recipe: Recipe, settings: dict[str, object]) -> Recipe:
    """`recipe` with values in place of its own, by dotted key. Raises RecipeError."""
    return reload(recipe, tuple(f"{key}={json.dumps(value)}" for key, value in settings.items()))


def trained(recipe: Recipe, uri: Path, interrupted: Event) -> Run:
    """The run of `recipe` at `uri`, created if it is not there, trained to its end or from where it is.

    Raises KeyboardInterrupt: `interrupted` was set, and a checkpoint committed. RunError: it cannot be trained.
    RunChanged: it is there with another recipe.
    """
    now = datetime.now(UTC)
    if open_store(str(uri)).size(RECORD) is None:
        run = create_run(recipe, str(uri), now)
    else:
        run = reconcile(open_run(str(uri)), recipe=recipe, accept_changes=False, now=now)
    if not is_complete(run):
        _train(run, interrupted)
    return run


def is_complete(run: Run) -> bool:
    """Whether its last step is committed. Raises StoreError."""
    marks = committed(run.store)
    return bool(marks) and marks[0].step >= run.recipe.total_steps


def _train(run: Run, interrupted: Event) -> None:
    """Started again while it goes on. Another command that trains the run is waited for, while it does."""
    step, left = -1, _TRIES
    while left:
        ending = train(run.uri, show=False)
        if ending.how == "finished":
            return
        if ending.how != "again":
            break
        left = _TRIES if ending.step > step else left - 1
        step = ending.step
        if interrupted.wait(_PAUSE_S):
            raise KeyboardInterrupt
    raise RunError(f"{run.uri} ended at step {ending.step}: {ending.said}", remedy="see what it said")
