"""Sends a checkpoint to other machines: the files of its export as bytes, and a folder made of them there."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.after.finetune.pretrained import LocalModel, module_folders

_SENT = (".json", ".safetensors", ".txt", ".model")  # never a pickle, nor what a trainer left


@dataclass(frozen=True)
class Shipped:
    """`pretrained`, whose folder is of the machine it comes from; and its files: bytes, by path in the folder."""

    pretrained: LocalModel
    files: Mapping[str, NDArray[np.uint8]]


def pack(pretrained: LocalModel) -> Shipped:
    """Read into memory."""
    files = {
        str(path.relative_to(pretrained.folder)): np.fromfile(path, np.uint8)
        for path in _parts(pretrained.folder)
    }
    return Shipped(pretrained, files)


def unpack(shipped: Shipped, place: Path) -> LocalModel:
    """In a folder below `place`, which processes of this machine share: the first that needs it writes it."""
    folder = place / shipped.pretrained.digest
    if not folder.exists():
        place.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".", dir=place))
        for name, content in shipped.files.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            content.tofile(fresh / name)
        try:
            os.rename(fresh, folder)
        except OSError:
            shutil.rmtree(fresh)
            if not folder.is_dir():  # else somebody was faster
                raise
    return replace(shipped.pretrained, folder=folder)


def _parts(folder: Path) -> Iterator[Path]:
    """The model's files, and those of a SentenceTransformer's modules beside them."""
    yield from (path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in _SENT)
    for module in module_folders(folder):
        yield from (path for path in sorted((folder / module).rglob("*")) if path.is_file())
