"""A checkpoint whose weights are not trained any further: its encoder, with its tokenizer.

Everything here computes on the CPU in fp32, so the same weights give the same figures on any machine.
"""

import hashlib
import json
from dataclasses import dataclass

import torch

from checkpoints.hf.load import read_folder_config, weights_for
from checkpoints.layout import CheckpointManifest
from checkpoints.load import Reader
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.families.catalogue import AnyEncoder, build_encoder
from encoder_core.families.interchange import ENCODER
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.losses import ObjectiveModule
from launcher.after.finetune.pretrained import LocalModel, open_pretrained
from launcher.runtime.rank.build import build_model
from launcher.runtime.recipe.objective import task_encoder
from launcher.runtime.recipe.timeline import recipe_after
from launcher.runtime.run.checkpoint import select_checkpoint
from launcher.runtime.run.record import RECORD, Run, open_run


@dataclass(frozen=True)
class Frozen:
    """An encoder in evaluation mode, and what its rows look like.

    Attributes:
        name: for people: `runs/base at step 1,000`.
        encoder: of a generator and a discriminator, the discriminator's.
        tokenizer: of its inputs.
        length: most tokens in a row, special ones included.
        class_token_last: whether a row ends with its class token (XLNet) instead of beginning with it.
        digest: SHA-256 of what decides a hidden state: equal digests, equal figures.
    """

    name: str
    encoder: AnyEncoder
    tokenizer: Tokenizer
    length: int
    class_token_last: bool
    digest: str


@dataclass(frozen=True)
class Checkpoint:
    """A run's checkpoint in memory, whatever becomes of its files.

    Attributes:
        objective: the module that was trained, in evaluation mode.
        frozen: its encoder for other tasks.
    """

    run: Run
    step: int
    objective: ObjectiveModule
    frozen: Frozen


def open_frozen(source: str, step: int | None = None) -> Frozen:
    """The encoder of a run's checkpoint (`step`; None: the newest good one), or of a folder in the transformers format.

    Raises:
        RunError: neither is there, or no such checkpoint. TokenizerError: a folder without a tokenizer.
        CheckpointError, ModelError: it is damaged, or no model of ours. StoreError: it cannot be read.
    """
    if open_store(source).size(RECORD) is not None:
        return open_checkpoint(open_run(source), step).frozen
    with open_pretrained(source, step) as pretrained:
        return frozen_folder(pretrained)


def frozen_folder(pretrained: LocalModel) -> Frozen:
    """The encoder in a transformers folder; heads there are passed over. Raises as `open_frozen`."""
    config = read_folder_config(pretrained.folder)
    tensors = weights_for(config, pretrained.folder, "plm" if isinstance(config, XlnetConfig) else "mlm")
    encoder = build_encoder(config)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.copy_(tensors[ENCODER + name])
    tokenizer = load_tokenizer(str(pretrained.folder))
    last = isinstance(config, XlnetConfig)
    return Frozen(pretrained.name, encoder.eval(), tokenizer, config.max_length, last, pretrained.digest)


def open_checkpoint(run: Run, step: int | None = None) -> Checkpoint:
    """A run's checkpoint, copied into memory. Raises as `launcher.runtime.run.checkpoint.select_checkpoint`."""
    return read_checkpoint(run, select_checkpoint(run, step))


def read_checkpoint(run: Run, manifest: CheckpointManifest) -> Checkpoint:
    """The checkpoint of a manifest, each byte of it verified. Raises DamagedCheckpoint, StoreError."""
    tokenizer = run.tokenizer()
    module = build_model(recipe_after(run.recipe, manifest.step), tokenizer)
    digest = hashlib.sha256(_identity(run, manifest.step, tokenizer))
    with Reader(run.store, manifest) as reader, torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            weights = reader.read_full(name)
            digest.update(json.dumps([name, list(weights.shape)]).encode())
            digest.update(weights.numpy().data)
            parameter.copy_(weights)
    return _checkpoint(run, manifest.step, module, tokenizer, digest.hexdigest())


def untrained(run: Run) -> Checkpoint:
    """The run's network with its initial weights: the baseline for every measure."""
    tokenizer = run.tokenizer()
    module = build_model(recipe_after(run.recipe, 0), tokenizer)
    digest = hashlib.sha256(_identity(run, 0, tokenizer) + f"untrained {run.recipe.seed}".encode())
    return _checkpoint(run, 0, module, tokenizer, digest.hexdigest())


def _checkpoint(
    run: Run, step: int, module: ObjectiveModule, tokenizer: Tokenizer, digest: str
) -> Checkpoint:
    module.eval()
    last = isinstance(run.recipe.model, XlnetConfig)
    name = f"{run.uri} at step {step:,}"
    frozen = Frozen(name, task_encoder(module), tokenizer, _length(run), last, digest)
    return Checkpoint(run, step, module, frozen)


def _identity(run: Run, step: int, tokenizer: Tokenizer) -> bytes:
    """What decides a hidden state beside weights."""
    model = recipe_after(run.recipe, step).model
    config = model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    objective, length = run.recipe.objective.model_dump(mode="json"), _length(run)
    return json.dumps([config.model_dump(mode="json"), objective, tokenizer.hash, length]).encode()


def _length(run: Run) -> int:
    return max(phase.length for phase in run.recipe.phases)
