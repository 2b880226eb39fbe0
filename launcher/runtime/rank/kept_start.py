"""Copies the model that a new run starts from into the run, if the model is on the Hub or must be converted.

A run must be repeatable on any machine, at any time. So `init` pins a model of the Hugging Face Hub
(`start: hf://ORG/NAME[@REVISION]`) to a commit and copies that commit's files into the run, RUN/start/ORG/NAME@COMMIT.
Pickled weights are converted once, and the run holds them as safetensors: RUN/start/NAME. If a recipe trains a pair,
and the generator is in the discriminator's folder (as in the published DeBERTa v3), the copy has a folder for each. The
run's recipe then starts from the copy.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from checkpoints.hf.folder import (
    CONFIG,
    GENERATOR_CONFIG,
    GENERATOR_PICKLE,
    PAIR_FOLDERS,
    PICKLE,
    PICKLE_INDEX,
    copy_file,
    copy_network,
    holds_generator,
    pickled_networks,
    replace_path_in_errors,
)
from data_service.processes import temporary_folder
from data_service.store.base import Store
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from data_service.tokenizers.files import TOKENIZER_FILES
from encoder_core.errors import ModelError
from launcher.errors import RecipeError, RunError, import_optional
from launcher.runtime.recipe.schema import SCRATCH, TEACHER, Recipe
from launcher.runtime.run.outline import open_unused_store


def keep_start(recipe: Recipe, run: str) -> Recipe:
    """Copy the model that `recipe` starts from into the run, if it is on the Hub, pickled, or a pair in one folder.
    Return the recipe with the copy as its start; without a copy, return it unchanged.

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
    if recipe.start.startswith(HUB_SCHEME):
        place = open_unused_store(run)
        folder, name = fetch_hub_model(recipe.start, generator=both)
        source: Store = LocalStore(folder)
        both &= holds_generator(source)
    else:
        source = open_store(recipe.start)
        name = source.uri.rstrip("/").rpartition("/")[2]
        both &= holds_generator(source)
        if not both and not pickled_networks(source):
            return recipe
        place = open_unused_store(run)
    opened = _pair_folder(source) if both else _without_pickles(source)
    with ExitStack() as stack:
        with replace_path_in_errors(source.uri.rstrip("/"), recipe.start):
            folder = stack.enter_context(opened)
        _check_and_copy(folder, recipe, place.with_prefix(f"start/{name}"))
    return recipe.model_copy(update={"start": f"{run.rstrip('/')}/start/{name}"})


def _check_and_copy(folder: Path, recipe: Recipe, target: Store) -> None:
    from launcher.runtime.rank.initial_weights import check_start  # imports torch

    try:
        check_start(recipe.model_copy(update={"start": str(folder)}))
    except (ModelError, RunError) as error:
        raise type(error)(error.problem.replace(str(folder), recipe.start), remedy=error.remedy) from error
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for file in wanted_files(files):
        target.put_file(file, folder / file)


@contextmanager
def _without_pickles(source: Store) -> Iterator[Path]:
    """Yield a local folder with the files of `source`, and with safetensors where weights are pickled."""
    pickled = pickled_networks(source)
    if not pickled:
        assert isinstance(source, LocalStore)  # a model without pickles is only copied from the Hub's local folder
        yield source.root
        return
    with temporary_folder("start") as folder:
        for part in (".", *PAIR_FOLDERS):
            network = source if part == "." else source.with_prefix(part)
            with replace_path_in_errors(folder / part, network.uri):
                _copy_network(network, folder / part, pickled=part in pickled)
        yield folder


@contextmanager
def _pair_folder(source: Store) -> Iterator[Path]:
    """Yield a local folder of a pair, made from a discriminator and a generator that share the folder `source`."""
    from checkpoints.hf.load import generator_fields  # this import and the next import torch
    from checkpoints.hf.pickled import convert_network

    with temporary_folder("start") as folder:
        generator, discriminator = (folder / part for part in PAIR_FOLDERS)
        with replace_path_in_errors(discriminator, source.uri):
            _copy_network(source, discriminator, pickled="." in pickled_networks(source))
        generator.mkdir()
        with replace_path_in_errors(generator, source.uri):
            (generator / CONFIG).write_text(json.dumps(generator_fields(source), indent=1) + "\n")
            convert_network(source, generator, GENERATOR_PICKLE)
        yield folder


def _copy_network(network: Store, folder: Path, *, pickled: bool) -> None:
    copy_network(network, folder)
    for name in TOKENIZER_FILES:
        copy_file(network, name, folder)
    if pickled:
        from checkpoints.hf.pickled import convert_network  # imports torch

        convert_network(network, folder)


HUB_SCHEME = "hf://"
_HUB_URI = re.compile(r"hf://(?P<repo>(?:[\w.-]+/)?[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_WEIGHT_PATTERNS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_WANTED_PATTERNS = ("config.json", *_WEIGHT_PATTERNS, *TOKENIZER_FILES)  # files that a start needs
_PICKLED_PATTERNS = (PICKLE, "pytorch_model-*.bin", PICKLE_INDEX)  # needed if a network has no safetensors
_HUB_TIMEOUT_S = 20.0  # seconds to wait for an answer of the Hub


def fetch_hub_model(uri: str, *, generator: bool) -> tuple[Path, str]:
    """Fetch the model at hf://ORG/NAME[@REVISION]. Return its folder on this machine, and its name with the commit,
    ORG/NAME@COMMIT. `generator`: whether to fetch a generator in the same folder, too.

    Raises:
        RecipeError: there is no such model, or the Hub cannot be reached.
        MissingPackage: huggingface_hub is not installed.
    """
    match = _HUB_URI.fullmatch(uri)
    if match is None:
        raise RecipeError(f"start: {uri} does not name a model", remedy="write hf://ORG/NAME or hf://ORG/NAME@REVISION")
    hub = import_optional("huggingface_hub", f"start: {uri}")
    try:
        # The endpoint is passed, because HF_ENDPOINT may have been set after huggingface_hub read it at its import.
        api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        info = api.model_info(match["repo"], revision=match["revision"], timeout=_HUB_TIMEOUT_S)
        files = wanted_files([sibling.rfilename for sibling in info.siblings], generator=generator)
        paths = [api.hf_hub_download(match["repo"], file, revision=info.sha) for file in files]
    except (hub.errors.HTTPError, hub.errors.EntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RecipeError(
            f"start: {uri} cannot be fetched: {reason[0]}",
            remedy="check the name, the network (HF_ENDPOINT, HF_HUB_OFFLINE), and HF_TOKEN if the model is gated; or "
            "copy its folder to this machine and set start to the folder",
        ) from error
    if "config.json" not in files and not any(f"{part}/config.json" in files for part in PAIR_FOLDERS):
        raise RecipeError(f"start: {uri} has no config.json", remedy="name a model in the transformers format")
    folder = Path(paths[0])
    for _ in Path(files[0]).parts:
        folder = folder.parent
    return folder, f"{match['repo']}@{info.sha}"


def wanted_files(files: list[str], *, generator: bool = False) -> list[str]:
    """Return the files among `files` (paths in a folder) that hold a run's initial weights. Pickled weights are taken
    only where a network has no safetensors. `generator`: whether those of a generator in the same folder are, too."""
    generator_files = (GENERATOR_CONFIG, GENERATOR_PICKLE) if generator else ()
    return [file for file in files if file in generator_files or _is_wanted(file, files)]


def _is_wanted(file: str, files: list[str]) -> bool:
    part, _, name = file.rpartition("/")
    if part not in ("", *PAIR_FOLDERS):
        return False
    neighbours = [other.rpartition("/")[2] for other in files if other.rpartition("/")[0] == part]
    pickled = not any(fnmatchcase(other, pattern) for other in neighbours for pattern in _WEIGHT_PATTERNS)
    return any(fnmatchcase(name, pattern) for pattern in (*_WANTED_PATTERNS, *(_PICKLED_PATTERNS if pickled else ())))
