"""Copies into a new run what it starts from, if that cannot be read again in the same way.

A run must be repeatable on any machine, at any time. So `init` pins a model of the Hub to a commit and copies that
commit's files into the run, RUN/start/ORG/NAME@COMMIT. Pickled weights, from wherever, are converted once, and the run
holds the safetensors: RUN/start/NAME. If a recipe trains a pair, and the generator lies beside the discriminator as
DeBERTa v3 is published, the copy has a folder for each. The copy takes the place of the start in the run's recipe.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoints.hf.folder import (
    CONFIG,
    GENERATOR_PICKLE,
    NETWORKS,
    copy_network,
    holds_generator,
    pickled_networks,
)
from data_service.processes import temporary_folder
from data_service.store.base import Store
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from data_service.tokenizers.files import TOKENIZER_FILES
from encoder_core.errors import ModelError
from launcher.errors import RunError
from launcher.runtime.rank.hub_models import SCHEME, fetch, wanted_files
from launcher.runtime.recipe.schema import SCRATCH, TEACHER, Recipe
from launcher.runtime.run.outline import open_unused_store


def keep_start(recipe: Recipe, run: str) -> Recipe:
    """Copy the model that `recipe` starts from into the run, if it is on the Hub, pickled, or a pair in one folder, and
    return the recipe with the copy as its start. Return any other recipe unchanged.

    `run`: URI of a run that does not exist yet.

    Raises:
        RecipeError: if there is no such model on the Hub, or the Hub cannot be reached.
        MissingPackage: if huggingface_hub is not installed.
        RunError, ModelError, TokenizerError: if there is a run at `run`, pickled weights are refused, or the recipe
            cannot start from the model.
        StoreError: if the model cannot be read, or the copy cannot be written.
    """
    if recipe.start in (SCRATCH, TEACHER):
        return recipe
    both = recipe.objective.rtd is not None
    if recipe.start.startswith(SCHEME):
        place = open_unused_store(run)
        folder, name = fetch(recipe.start, generator=both)
        source: Store = LocalStore(folder)
        both &= holds_generator(source)
    else:
        source = open_store(recipe.start)
        name = source.uri.rstrip("/").rpartition("/")[2]
        both &= holds_generator(source)
        if not both and not pickled_networks(source):
            return recipe
        place = open_unused_store(run)
    with _pair(source, recipe.start) if both else _without_pickles(source, recipe.start) as folder:
        _copy(folder, recipe, place.at(f"start/{name}"))
    return recipe.model_copy(update={"start": f"{run.rstrip('/')}/start/{name}"})


def _copy(folder: Path, recipe: Recipe, copy: Store) -> None:
    from launcher.runtime.rank.initial_weights import check_start  # imports torch

    try:
        check_start(recipe.model_copy(update={"start": str(folder)}))
    except (ModelError, RunError) as error:
        raise type(error)(error.problem.replace(str(folder), recipe.start), remedy=error.remedy) from error
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for file in wanted_files(files):
        copy.put_file(file, folder / file)


@contextmanager
def _without_pickles(source: Store, start: str) -> Iterator[Path]:
    """Yield a local folder with the files of `source`, and with safetensors where weights are pickled."""
    pickled = pickled_networks(source)
    if not pickled:
        assert isinstance(source, LocalStore)  # `source` was fetched from the Hub
        yield source.root
        return
    with temporary_folder("start") as folder:
        for part in (".", *NETWORKS):
            network = source if part == "." else source.at(part)
            with _errors_named(folder / part, network, source, start):
                _copy_network(network, folder / part, pickled=part in pickled)
        yield folder


@contextmanager
def _pair(source: Store, start: str) -> Iterator[Path]:
    """Yield a local folder of a pair, made from a discriminator and the generator beside it in `source`."""
    from checkpoints.hf.heads import generator_fields  # this import and the next load torch
    from checkpoints.hf.pickled import convert_network

    with temporary_folder("start") as folder:
        generator, discriminator = (folder / part for part in NETWORKS)
        with _errors_named(discriminator, source, source, start):
            _copy_network(source, discriminator, pickled="." in pickled_networks(source))
        generator.mkdir()
        with _errors_named(generator, source, source, start):
            (generator / CONFIG).write_text(json.dumps(generator_fields(source), indent=1) + "\n")
            convert_network(source, generator, GENERATOR_PICKLE)
        yield folder


def _copy_network(network: Store, folder: Path, *, pickled: bool) -> None:
    copy_network(network, folder)
    for name in TOKENIZER_FILES:
        if network.size(name) is not None:
            (folder / name).write_bytes(network.get(name))
    if pickled:
        from checkpoints.hf.pickled import convert_network  # imports torch

        convert_network(network, folder)


@contextmanager
def _errors_named(folder: Path, network: Store, source: Store, start: str) -> Iterator[None]:
    """Let the errors inside the `with` block name the network as the user does, below `start`, and not its copy in
    `folder`, nor `source`, where the Hub's files lie."""
    try:
        yield
    except ModelError as error:
        problem = error.problem.replace(str(folder), network.uri)
        problem = problem.replace(source.uri.rstrip("/"), start.rstrip("/"))
        raise ModelError(problem, remedy=error.remedy) from error
