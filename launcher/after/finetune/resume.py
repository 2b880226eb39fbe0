"""What a fine-tuning that was ended goes on from: its state after some update, as a checkpoint in a scratch folder.

Tensors are safetensors, the rest is JSON. The order of examples and dropout are drawn from seed, epoch and step. So one
that goes on gives the bits of one that nobody ended.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from launcher.after.finetune.measure import SplitScores
from launcher.after.finetune.network import TaskNetwork
from launcher.after.finetune.outcome import Epoch
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.scratch import Scratch, open_scratch, seal
from launcher.after.finetune.settings import FinetuneSettings
from launcher.output import write_file

_NETWORK, _OPTIMIZER, _BEST = "network.safetensors", "optimizer.safetensors", "best.safetensors"
_STATE = "state.json"
_PACKAGES = ("maskfleet", "transformers", "torch")


@dataclass
class Best:
    """The epoch, from 1, that is kept so far, with its main metric on dev and its weights; `scores` are not stored."""

    epoch: int
    main: float
    weights: Mapping[str, Tensor]
    scores: SplitScores | None = None


@dataclass
class TrainingState:
    """What is known after some updates, beside network and optimizer.

    Attributes:
        losses: of every update.
        curves: of every epoch that is over.
    """

    losses: list[float] = field(default_factory=list)
    curves: list[Epoch] = field(default_factory=list)
    best: Best | None = None


@contextmanager
def opened_scratch(
    folder: Path | None, start: LocalModel, examples: str, settings: FinetuneSettings, seed: int
) -> Iterator[Scratch | None]:
    """The scratch of the fine-tuning that these decide; `examples` is the digest of the task and what is in it.

    Raises RunError: as `open_scratch`.
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
    """In place of the checkpoint before."""
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
    """Puts the newest state into network and optimizer; a state without updates, and both as they are, if there is
    none."""
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
