"""Checkpoints in a scratch folder of this machine, from which an interrupted fine-tuning or embedding training resumes.

A fine-tuning stores tensors as safetensors and the rest as JSON. The order of examples and dropout are drawn from seed,
epoch and step. So a resumed fine-tuning yields the same bits as an uninterrupted one.

An embedding training stores the trainer's own files, with optimizer state in torch's format. Loading that can run code,
so it is only read under three conditions: the folder belongs to this user and nobody else can write to it; it was
written for the same training; and every file has the SHA-256 with which it was written. Other files there are not
opened. These files are never put into a store.
"""

import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.hf.folder import file_digest
from data_service.processes import locked
from launcher.after.finetune.measure import SplitScores
from launcher.after.finetune.network import TaskNetwork
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.settings import Epoch, FinetuneSettings
from launcher.errors import RunError
from launcher.output import write_file

_LOG = logging.getLogger(__name__)
TRAINING = "training.json"
"""Name of the file that marks a scratch folder and identifies its training."""
_WRITTEN = "written.json"
_PREFIX = "checkpoint-"


@dataclass(frozen=True)
class Scratch:
    """A folder with the checkpoints of one training.

    Attributes:
        folder: path of the folder on this machine.
        kept: whether the folder outlives the command, so that the same command can resume from it.
    """

    folder: Path
    kept: bool

    def newest(self) -> Path | None:
        """Return the newest checkpoint that is complete and unchanged since it was written; None if there is none."""
        for path in sorted(self.folder.glob(f"{_PREFIX}*"), key=_step, reverse=True):
            if _is_as_written(path):
                return path
            _LOG.warning("%s is incomplete or changed, and is ignored", path)
        return None

    def place(self, step: int) -> Path:
        """Make and return an empty folder for the checkpoint of that step."""
        path = self.folder / f"{_PREFIX}{step}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def remove_checkpoints(self, but: Path | None = None) -> None:
        for path in self.folder.glob(f"{_PREFIX}*"):
            if path != but:
                shutil.rmtree(path)

    def remove(self) -> None:
        """Remove the checkpoints, and the folder if nothing else is in it."""
        self.remove_checkpoints()
        for path in (self.folder / TRAINING, self.folder / "eval"):
            with suppress(FileNotFoundError, NotADirectoryError, OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        with suppress(OSError):
            self.folder.rmdir()


@contextmanager
def open_scratch(folder: Path, training: Mapping[str, object]) -> Iterator[Scratch]:
    """Provide the scratch folder of a training, made if needed. Checkpoints of another training there are removed.

    `training`: everything that the training depends on. Raises RunError if the folder holds other files, others can
    write to it, or another command uses it.
    """
    identity = json.dumps(training, sort_keys=True, indent=1) + "\n"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error}", remedy="give another --scratch") from error
    _check_owner(folder)
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder, wait=False))
        except BlockingIOError as error:
            raise RunError(
                f"another training is using {folder}", remedy="wait for it, or give another --scratch"
            ) from error
        yield _of_this_training(folder, identity)


def _of_this_training(folder: Path, identity: str) -> Scratch:
    scratch, record = Scratch(folder, kept=True), folder / TRAINING
    former = record.read_text("utf-8") if record.is_file() else None
    if former is None and any(folder.iterdir()):
        raise RunError(
            f"{folder} holds files that no training wrote there", remedy="give --scratch an empty folder"
        )
    if former is not None and former != identity:
        _LOG.warning(
            "%s: model, data, settings or versions have changed, so the training starts from the beginning",
            folder,
        )
        scratch.remove_checkpoints()
    write_file(record, identity)
    return scratch


def _check_owner(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RunError(
            f"others may write to {folder}, so its files cannot be trusted",
            remedy=f"chmod 700 {folder}, or give --scratch a folder of your own",
        )


def seal(checkpoint: Path) -> None:
    """Complete a checkpoint with a list of all its files and their hashes."""
    write_file(checkpoint / _WRITTEN, json.dumps(_digests(checkpoint), sort_keys=True, indent=1))


def _is_as_written(checkpoint: Path) -> bool:
    record = checkpoint / _WRITTEN
    try:
        written = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return False
    return bool(written == _digests(checkpoint))


def _digests(checkpoint: Path) -> dict[str, str]:
    found = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != _WRITTEN:
            found[path.relative_to(checkpoint).as_posix()] = file_digest(path)
    return found


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix(_PREFIX)
    return int(number) if number.isdecimal() else -1


_NETWORK, _OPTIMIZER, _BEST = "network.safetensors", "optimizer.safetensors", "best.safetensors"
_STATE = "state.json"
_PACKAGES = ("maskfleet", "transformers", "torch")


@dataclass
class Best:
    """The epoch (from 1) whose weights are kept so far, with its main metric on dev and its weights. `scores` are not
    stored."""

    epoch: int
    main: float
    weights: Mapping[str, Tensor]
    scores: SplitScores | None = None


@dataclass
class TrainingState:
    """The state of a fine-tuning beside network and optimizer.

    Attributes:
        losses: loss of every update.
        curves: loss and metrics of every completed epoch.
        best: the epoch that is kept so far; None before the first.
    """

    losses: list[float] = field(default_factory=list)
    curves: list[Epoch] = field(default_factory=list)
    best: Best | None = None


@contextmanager
def opened_scratch(
    folder: Path | None, start: LocalModel, examples: str, settings: FinetuneSettings, seed: int
) -> Iterator[Scratch | None]:
    """Provide the scratch folder of the fine-tuning with these arguments; None without a folder.

    `examples`: digest of the task and its examples. Raises RunError as `open_scratch`.
    """
    if folder is None:
        yield None
        return
    what = {
        "weights": start.digest,
        "examples": examples,
        "settings": settings.model_dump(mode="json"),
        "seed": seed,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "versions": {name: metadata.version(name) for name in _PACKAGES},
    }
    with open_scratch(folder, what) as scratch:
        yield scratch


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def save(scratch: Scratch, network: TaskNetwork, optimizer: torch.optim.AdamW, state: TrainingState) -> None:
    """Save a checkpoint and remove the previous one. The previous one is removed only after the new one is complete, so
    a crash leaves at least one complete checkpoint; `newest` ignores an incomplete one."""
    from safetensors.torch import save_file

    place = scratch.place(len(state.losses))
    save_file(copied(network.state_dict()), place / _NETWORK)
    save_file(copied(_moments(optimizer)), place / _OPTIMIZER)
    known: dict[str, object] = {"losses": state.losses, "curves": [asdict(epoch) for epoch in state.curves]}
    if state.best is not None:
        save_file(dict(state.best.weights), place / _BEST)
        known |= {"best_epoch": state.best.epoch, "best_main": state.best.main}
    write_file(place / _STATE, json.dumps(known))
    seal(place)
    scratch.remove_checkpoints(but=place)


def restore(scratch: Scratch, network: TaskNetwork, optimizer: torch.optim.AdamW) -> TrainingState:
    """Load the newest checkpoint into network and optimizer, and return its state. Without a checkpoint, leave both
    unchanged and return a state without updates."""
    from safetensors.torch import load_file

    place = scratch.newest()
    if place is None:
        return TrainingState()
    network.load_state_dict(load_file(place / _NETWORK))
    _restore_moments(optimizer, load_file(place / _OPTIMIZER))
    known = json.loads((place / _STATE).read_bytes())
    best = (
        Best(known["best_epoch"], known["best_main"], load_file(place / _BEST))
        if "best_epoch" in known
        else None
    )
    return TrainingState(known["losses"], [Epoch(**epoch) for epoch in known["curves"]], best)


def _moments(optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": tensor for index, of in state.items() for name, tensor in of.items()}


def _restore_moments(optimizer: torch.optim.AdamW, moments: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in moments.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
