"""`start: hf://ORG/NAME[@REVISION]`: a model of the Hugging Face Hub, fetched once, at `init` (`kept_start`)."""

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

from checkpoints.hf.folder import GENERATOR_CONFIG, GENERATOR_PICKLE, NETWORKS, PICKLE, PICKLE_INDEX
from data_service.tokenizers.files import TOKENIZER_FILES
from launcher.errors import RecipeError, import_optional

SCHEME = "hf://"
_NAME = re.compile(r"hf://(?P<repo>(?:[\w.-]+/)?[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_FILES = ("config.json", *_WEIGHTS, *TOKENIZER_FILES)
_PICKLED_FILES = (PICKLE, "pytorch_model-*.bin", PICKLE_INDEX)
_PATIENCE_S = 20.0  # time limit for an answer of the Hub


def fetch(uri: str, *, generator: bool) -> tuple[Path, str]:
    """Fetch the model at hf://ORG/NAME[@REVISION]. Return its folder on this machine, and its name with the commit,
    ORG/NAME@COMMIT. `generator`: whether to fetch a generator that lies beside it, too.

    Raises:
        RecipeError: there is no such model, or the Hub cannot be reached.
        MissingPackage: huggingface_hub is not installed.
    """
    match = _NAME.fullmatch(uri)
    if match is None:
        raise RecipeError(
            f"start: {uri} does not name a model", remedy="write hf://ORG/NAME or hf://ORG/NAME@REVISION"
        )
    hub = import_optional("huggingface_hub", f"start: {uri}")
    try:
        # HF_ENDPOINT may have been set after the import.
        api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        info = api.model_info(match["repo"], revision=match["revision"], timeout=_PATIENCE_S)
        files = wanted_files([sibling.rfilename for sibling in info.siblings], generator=generator)
        paths = [api.hf_hub_download(match["repo"], file, revision=info.sha) for file in files]
    except (hub.errors.HTTPError, hub.errors.EntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RecipeError(
            f"start: {uri} cannot be fetched: {reason[0]}",
            remedy="check the name, the network (HF_ENDPOINT, HF_HUB_OFFLINE), and HF_TOKEN if the model is gated; or "
            "copy its folder to this machine and set start to the folder",
        ) from error
    if "config.json" not in files and not any(f"{part}/config.json" in files for part in NETWORKS):
        raise RecipeError(
            f"start: {uri} has no config.json", remedy="name a model in the transformers format"
        )
    folder = Path(paths[0])
    for _ in Path(files[0]).parts:
        folder = folder.parent
    return folder, f"{match['repo']}@{info.sha}"


def wanted_files(files: list[str], *, generator: bool = False) -> list[str]:
    """Return those of `files`, paths in a folder, that a start needs. Pickled weights are among them where a network
    has no others. `generator`: whether those of a generator beside the model are needed."""
    beside = (GENERATOR_CONFIG, GENERATOR_PICKLE) if generator else ()
    return [file for file in files if file in beside or _is_wanted(file, files)]


def _is_wanted(file: str, files: list[str]) -> bool:
    part, _, name = file.rpartition("/")
    if part not in ("", *NETWORKS):
        return False
    beside = [other.rpartition("/")[2] for other in files if other.rpartition("/")[0] == part]
    pickled = not any(fnmatchcase(other, pattern) for other in beside for pattern in _WEIGHTS)
    return any(fnmatchcase(name, pattern) for pattern in (*_FILES, *(_PICKLED_FILES if pickled else ())))
