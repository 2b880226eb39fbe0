"""Copies into a new run what it starts from, if that cannot be read again in the same way.

A run must be repeatable on any machine, at any time. So `init` pins a model of the Hub to a commit and copies that
commit's files into the run, RUN/start/ORG/NAME@COMMIT. Pickled weights, from wherever, are converted once, and the run
holds the safetensors: RUN/start/NAME. The copy takes the place of the start in the run's recipe.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoints.hf.folder import PARTS, copy_network, pickled_networks
from data_service.processes import temporary_folder
from data_service.store.base import Store
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from data_service.tokenizers.files import TOKENIZER_FILES
from encoder_core.errors import ModelError
from launcher.errors import RunError
from launcher.runtime.rank.hub_models import SCHEME, fetch, wanted
from launcher.runtime.recipe.schema import SCRATCH, TEACHER, Recipe
from launcher.runtime.run.outline import free_place


def keep_start(recipe: Recipe, run: str) -> Recipe:
    """Copy the model that `recipe` starts from into the run, if it is on the Hub or pickled, and return the recipe with
    the copy as its start. Return any other recipe unchanged.

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
    if recipe.start.startswith(SCHEME):
        place = free_place(run)
        folder, name = fetch(recipe.start)
        source: Store = LocalStore(folder)
    else:
        source = open_store(recipe.start)
        name = source.uri.rstrip("/").rpartition("/")[2]
        if not pickled_networks(source):
            return recipe
        place = free_place(run)
    with _safe(source, recipe.start) as folder:
        _copy(folder, recipe, place.at(f"start/{name}"))
    return recipe.model_copy(update={"start": f"{run.rstrip('/')}/start/{name}"})


def _copy(folder: Path, recipe: Recipe, copy: Store) -> None:
    from launcher.runtime.rank.initial_weights import check_start  # it loads torch

    try:
        check_start(recipe.model_copy(update={"start": str(folder)}))
    except (ModelError, RunError) as error:
        raise type(error)(error.problem.replace(str(folder), recipe.start), remedy=error.remedy) from error
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for file in wanted(files):
        copy.put_file(file, folder / file)


@contextmanager
def _safe(source: Store, start: str) -> Iterator[Path]:
    """Yield a local folder with the files of `source`, and with safetensors where weights are pickled."""
    pickled = pickled_networks(source)
    if not pickled:
        assert isinstance(source, LocalStore)  # fetched from the Hub
        yield source.root
        return
    with temporary_folder("start") as folder:
        for part in (".", *PARTS):
            network = source if part == "." else source.at(part)
            copy_network(network, folder / part)
            for name in TOKENIZER_FILES:
                if network.size(name) is not None:
                    (folder / part / name).write_bytes(network.get(name))
            if part in pickled:
                _convert(network, folder / part, source.uri, start)
        yield folder


def _convert(network: Store, folder: Path, uri: str, start: str) -> None:
    from checkpoints.hf.pickled import convert_network  # it loads torch

    try:
        convert_network(network, folder)
    except ModelError as error:
        problem = error.problem.replace(str(folder), network.uri).replace(uri.rstrip("/"), start.rstrip("/"))
        raise ModelError(problem, remedy=error.remedy) from error
