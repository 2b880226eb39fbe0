"""`start: hf://ORG/NAME[@REVISION]`: a model of the Hugging Face Hub, fetched once, at `init`, and stored in the run.

A run must be repeatable on any machine, at any time. So `init` pins the name to a commit, copies that commit's files
into the run, and replaces the name in the run's recipe by the copy: RUN/start/ORG/NAME@COMMIT.
"""

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

from checkpoints.hf.folder import PARTS
from data_service.tokenizers.files import TOKENIZER_FILES
from launcher.errors import RecipeError
from launcher.extras import optional
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.outline import free_place

SCHEME = "hf://"
_NAME = re.compile(r"hf://(?P<repo>(?:[\w.-]+/)?[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_NETWORK = ("config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_FILES = (*_NETWORK, *TOKENIZER_FILES)
_WANTED = (*_FILES, *(f"{part}/{name}" for part in PARTS for name in _FILES))
_PATIENCE_S = 20.0  # time limit for an answer of the Hub


def keep_start(recipe: Recipe, run: str) -> Recipe:
    """Copy the model that `recipe` starts from into the run, if it is on the Hub, and return the recipe with the copy
    as its start. Return any other recipe unchanged.

    `run`: URI of a run that does not exist yet.

    Raises:
        RecipeError: if there is no such model, or the Hub cannot be reached.
        MissingPackage: if huggingface_hub is not installed.
        RunError, ModelError, TokenizerError: if there is a run at `run`, or the recipe cannot start from the model.
        StoreError: if the copy cannot be written.
    """
    if not recipe.start.startswith(SCHEME):
        return recipe
    from launcher.runtime.rank.initial_weights import check_start  # it loads torch

    store = free_place(run)
    folder, name = fetch(recipe.start)
    check_start(recipe.model_copy(update={"start": str(folder)}))
    place = f"start/{name}"
    copy = store.at(place)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    for file in (file for file in files if _is_wanted(str(file))):
        copy.put_file(str(file), folder / file)
    return recipe.model_copy(update={"start": f"{run.rstrip('/')}/{place}"})


def fetch(uri: str) -> tuple[Path, str]:
    """Fetch the model at hf://ORG/NAME[@REVISION]. Return its folder on this machine, and its name with the commit,
    ORG/NAME@COMMIT.

    Raises RecipeError and MissingPackage as `keep_start` does.
    """
    match = _NAME.fullmatch(uri)
    if match is None:
        raise RecipeError(
            f"start: {uri} does not name a model", remedy="write hf://ORG/NAME or hf://ORG/NAME@REVISION"
        )
    hub = optional("huggingface_hub", f"start: {uri}")
    try:
        api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))  # as it is now, not at the import
        info = api.model_info(match["repo"], revision=match["revision"], timeout=_PATIENCE_S)
        files = [sibling.rfilename for sibling in info.siblings if _is_wanted(sibling.rfilename)]
        paths = [api.hf_hub_download(match["repo"], file, revision=info.sha) for file in files]
    except (hub.errors.HTTPError, hub.errors.EntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RecipeError(
            f"start: {uri} cannot be fetched: {reason[0]}",
            remedy="check the name, the network (HF_ENDPOINT, HF_HUB_OFFLINE), and HF_TOKEN if the model is gated; or "
            "copy its folder to this machine and set start to the folder",
        ) from error
    if "config.json" not in files and not any(f"{part}/config.json" in files for part in PARTS):
        raise RecipeError(
            f"start: {uri} has no config.json", remedy="name a model in the transformers format"
        )
    folder = Path(paths[0])
    for _ in Path(files[0]).parts:
        folder = folder.parent
    return folder, f"{match['repo']}@{info.sha}"


def _is_wanted(file: str) -> bool:
    return any(fnmatchcase(file, pattern) for pattern in _WANTED)
