"""A checkpoint to fine-tune and measure, as a local folder in the transformers format, and its digest.

A checkpoint is given as a run, whose newest good checkpoint (or that of a step) is exported into a temporary folder, or
as a folder in the transformers format, local or on S3. Of a generator and a discriminator, the discriminator is used.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from checkpoints.hf.folder import CONFIG, PAIR_FOLDERS, copy_file, file_digest
from checkpoints.hf.folder import EXPORT_RECORD as RECORD_OF_EXPORT
from checkpoints.hf.load import parse_json_object
from data_service.formats import parse_json
from data_service.processes import temporary_folder
from data_service.store.base import Store
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import TYPES_WITHOUT_HF_CLASS
from launcher.after.export.export import export_run
from launcher.after.export.model_card import DATA_CARDS_FILE
from launcher.after.export.sentence_transformer import MODULES_FILE
from launcher.errors import RunError
from launcher.runtime.run.record import RECORD_FILE, open_run

_READ_SUFFIXES = (".json", ".safetensors", ".txt", ".model")  # files that are read; never a pickle
# Files about the origin of a model, which its digest leaves out.
_UNDIGESTED_FILES = (
    RECORD_OF_EXPORT,
    "results.json",
    DATA_CARDS_FILE,
)


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine's disk.

    Attributes:
        source: run or folder, as the user gave it.
        step: step of a run's checkpoint; None for a folder.
        folder: folder with configuration, safetensors and tokenizer, as `transformers` loads them. Do not write there.
        digest: SHA-256 of the files that predictions depend on. Models with equal digests are equal.
    """

    source: str
    step: int | None
    folder: Path
    digest: str

    @property
    def name(self) -> str:
        """Name of the model for the user: `runs/base at step 1,000`."""
        return self.source if self.step is None else f"{self.source} at step {self.step:,}"


@contextmanager
def open_pretrained(source: str, step: int | None = None) -> Iterator[LocalModel]:
    """Provide the model at a run's URI or in a folder, on the local disk. Its files exist until the context ends.

    Raises:
        RunError: if there is neither a run nor a model, `step` is given with a folder, or the run has no such
            checkpoint.
        CheckpointError, ModelError: if the model is damaged, or transformers has no format for it.
        StoreError: if the model cannot be read.
    """
    store = open_store(source)
    with temporary_folder("model") as name:
        if store.size(RECORD_FILE) is not None:
            exported = export_run(open_run(source), step, str(name))
            part = PAIR_FOLDERS[1] if PAIR_FOLDERS[1] in exported.models else "."
            folder, step = Path(name, part), exported.step
        else:
            folder = _fetch_transformers_folder(source, step, store, name)
        yield LocalModel(source, step, folder, folder_digest(folder))


def _fetch_transformers_folder(source: str, step: int | None, store: Store, destination: Path) -> Path:
    part = next((part for part in (".", PAIR_FOLDERS[1]) if store.size(f"{part}/{CONFIG}".removeprefix("./"))), None)
    if part is None:
        raise RunError(
            f"{source} is neither a run nor a model: it has no {RECORD_FILE} and no {CONFIG}",
            remedy="give a run, or a folder in the transformers format",
        )
    if step is not None:
        raise RunError(f"{source} is a model, not a run: it has no steps", remedy="leave out --step")
    within = store if part == "." else store.with_prefix(part)
    if isinstance(within, LocalStore):
        return Path(within.root)
    for entry in within.list(""):
        if "/" not in entry.key and entry.key.endswith(_READ_SUFFIXES):
            copy_file(within, entry.key, destination)
    for module in _module_folders(destination):
        for entry in within.list(f"{module}/"):
            if entry.key.endswith(_READ_SUFFIXES):
                copy_file(within, entry.key, destination)
    return destination


def read_module_list(folder: Path) -> list[tuple[str, str]]:
    """Return the folder (such as `1_Pooling`) and kind of each module that modules.json of a SentenceTransformer lists;
    an empty list for any other model.

    Raises ModelError if modules.json does not list modules, or names folders outside of `folder`.
    """
    path = folder / MODULES_FILE
    if not path.is_file():
        return []
    try:
        found = [(str(module["path"]), str(module["type"])) for module in parse_json(path.read_bytes())]
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} does not list modules: {error}", remedy="fetch the file again") from error
    for name, _ in found:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelError(f"{path} names a folder outside the model's: {name}", remedy="fetch the whole model again")
    return found


def _module_folders(folder: Path) -> list[str]:
    """Return the folders of the modules that are not in `folder` itself."""
    return sorted({place for place, _ in read_module_list(folder) if place})


def model_files(folder: Path) -> list[Path]:
    """Return the files from which a model in `folder` is loaded, including a SentenceTransformer's modules."""
    places = [folder, *(folder / module for module in _module_folders(folder))]
    found = [path for place in places for path in place.glob("*") if path.suffix in _READ_SUFFIXES and path.is_file()]
    return sorted(path for path in found if path.name not in _UNDIGESTED_FILES)


def folder_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of the files in `folder` that the model's predictions depend on."""
    digest = hashlib.sha256()
    for path in model_files(folder):
        name = path.relative_to(folder).as_posix()
        digest.update(json.dumps([name, _content_digest(path)]).encode())
    return digest.hexdigest()


def _content_digest(path: Path) -> str:
    if path.name == CONFIG:  # predictions do not depend on its transformers_version
        fields = parse_json_object(path.read_bytes(), str(path))
        kept = {name: value for name, value in fields.items() if name not in ("transformers_version", "_name_or_path")}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    return file_digest(path)


def require_transformers_class(folder: Path, model_name: str) -> None:
    """Raise ModelError if transformers has no class for the model in `folder`. `model_name`: its name for the
    message."""
    path = folder / CONFIG
    fields = parse_json_object(path.read_bytes(), str(path)) if path.is_file() else {}
    if fields.get("model_type") in TYPES_WITHOUT_HF_CLASS:
        raise ModelError(
            f"{model_name} cannot be used for this, because transformers has no class for this model",
            remedy="use it with `maskfleet diagnose`, `maskfleet fill`, a recipe's `start:`, or "
            "`maskfleet.open_run(RUN).module()` in Python, which need no such class",
        )
