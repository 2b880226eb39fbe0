"""Frozen checkpoints, and the hidden states of each layer, pooled to one vector for each text. Probes and similarity
are measured on these vectors.

Everything is computed on the CPU in fp32, so the same weights give the same figures on any machine. Shapes: T tokens, N
rows, D depths (the embeddings and each layer's output), H hidden.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from checkpoints.hf.load import read_folder_config, weights_for
from checkpoints.layout import CheckpointManifest
from checkpoints.load import CheckpointReader
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.batch import Batch, batch_without_targets
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.interchange import ENCODER_PREFIX
from encoder_core.layers.any_encoder import AnyEncoder
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder
from encoder_core.objectives.modules.detection import task_encoder
from encoder_core.objectives.modules.losses import ObjectiveModule
from launcher.after.finetune.pretrained import LocalModel, open_pretrained
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.parts import Pooling
from launcher.runtime.recipe.timeline import recipe_after
from launcher.runtime.run.record import Run, select_checkpoint


@dataclass(frozen=True)
class FrozenEncoder:
    """An encoder in evaluation mode, and what its input rows look like.

    Attributes:
        name: name for the user: `runs/base at step 1,000`.
        encoder: the encoder; of a generator and a discriminator, the discriminator's.
        tokenizer: tokenizer of its inputs.
        length: largest number of tokens in a row, including special ones.
        class_token_last: whether a row ends with its class token (XLNet) instead of beginning with it.
        digest: SHA-256 of everything that hidden states depend on: equal digests mean equal figures.
    """

    name: str
    encoder: AnyEncoder
    tokenizer: Tokenizer
    length: int
    class_token_last: bool
    digest: str


@dataclass(frozen=True)
class Checkpoint:
    """A run's checkpoint in memory, whose files are no longer needed.

    Attributes:
        objective: the trained module, in evaluation mode.
        frozen: the module's encoder, to measure on tasks.
    """

    run: Run
    step: int
    objective: ObjectiveModule
    frozen: FrozenEncoder


def open_frozen_encoder(source: str, step: int | None = None) -> FrozenEncoder:
    """Return the encoder of a folder in the transformers format, or of a run's checkpoint, which is exported first.

    Raises:
        RunError: if there is neither a run nor a model, or no such checkpoint.
        TokenizerError: if the folder has no tokenizer.
        CheckpointError, ModelError: if the model is damaged, or of a family that we do not have.
        StoreError: if the model cannot be read.
    """
    with open_pretrained(source, step) as pretrained:
        return load_frozen_encoder(pretrained)


def load_frozen_encoder(pretrained: LocalModel) -> FrozenEncoder:
    """Return the encoder in a transformers folder, without its heads. Raises as `open_frozen_encoder`."""
    config = read_folder_config(pretrained.folder)
    own = config.has_decoder or config.permutes  # the formats of BART and XLNet have only their main heads
    tensors = weights_for(config, pretrained.folder, config.main_heads if own else "mlm")
    encoder = config.encoder()
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.copy_(tensors[ENCODER_PREFIX + name])
    tokenizer = load_tokenizer(str(pretrained.folder))
    last = config.class_token_last
    return FrozenEncoder(pretrained.name, encoder.eval(), tokenizer, config.max_length, last, pretrained.digest)


def open_checkpoint(run: Run, step: int | None = None) -> Checkpoint:
    """Return a run's checkpoint, copied into memory. Raises as `launcher.runtime.run.record.select_checkpoint`."""
    return read_checkpoint(run, select_checkpoint(run, step))


def read_checkpoint(run: Run, manifest: CheckpointManifest) -> Checkpoint:
    """Return the checkpoint of a manifest, after verifying every byte. Raises DamagedCheckpoint, StoreError."""
    tokenizer, trained = run.tokenizer(), recipe_after(run.recipe, manifest.step).model
    config = trained.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    module = objective_module(config, run.recipe.objective)
    digest = hashlib.sha256(_model_identity(run, config, tokenizer))
    with CheckpointReader(run.store, manifest) as reader, torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            weights = reader.read_full(name)
            digest.update(json.dumps([name, list(weights.shape)]).encode())
            digest.update(weights.numpy().data)
            parameter.copy_(weights)
    module.eval()
    frozen = FrozenEncoder(
        name=f"{run.uri} at step {manifest.step:,}",
        encoder=task_encoder(module),
        tokenizer=tokenizer,
        length=_max_row_tokens(run),
        class_token_last=run.recipe.model.class_token_last,
        digest=digest.hexdigest(),
    )
    return Checkpoint(run, manifest.step, module, frozen)


def _model_identity(run: Run, config: ModelConfig, tokenizer: Tokenizer) -> bytes:
    """Return, as JSON, everything but the weights on which hidden states depend."""
    objective, length = run.recipe.objective.model_dump(mode="json"), _max_row_tokens(run)
    return json.dumps([config.model_dump(mode="json"), objective, tokenizer.hash, length]).encode()


def _max_row_tokens(run: Run) -> int:
    return max(phase.length for phase in run.recipe.phases)


TokenRow = NDArray[np.int64]
"""Token ids of one row, special ones included."""

PooledStates = Mapping[Pooling, NDArray[np.float32]]
"""For each pooling, the vectors of N texts at D depths, [D, N, H]."""

_BATCH_TOKENS = 8192  # largest number of tokens in a forward pass of several rows
_CLASS_SEGMENT_ID = 2  # segment id of XLNet's class token, which no other token has


def encode_text_rows(frozen: FrozenEncoder, texts: Sequence[str]) -> list[TokenRow]:
    """Return each text as a row with special tokens, cut to the model's length."""
    cls, sep = frozen.tokenizer.special.cls, frozen.tokenizer.special.sep
    cut = [text[: frozen.length - 2].astype(np.int64) for text in frozen.tokenizer.encode_batch(texts)]
    return [np.r_[text, sep, cls] if frozen.class_token_last else np.r_[cls, text, sep] for text in cut]


@torch.no_grad()
def pooled_states(frozen: FrozenEncoder, rows: Sequence[TokenRow], poolings: Sequence[Pooling]) -> PooledStates:
    """Return the pooled states of every layer, in the order of `rows`. Equal `rows` are batched alike, so they get
    exactly equal states."""
    found = {pooling: list[Tensor]() for pooling in poolings}
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    for group in _forward_pass_groups([rows[index] for index in order]):
        batch = _make_batch(frozen, group)
        states_DTH = torch.stack([state.float() for state in layer_states(frozen.encoder, batch)])
        for pooling in poolings:
            found[pooling].append(_pool_states(frozen, states_DTH, batch, pooling))
    back = np.argsort(np.array(order, dtype=np.int64))
    return {pooling: torch.cat(parts, 1).numpy()[:, back] for pooling, parts in found.items()}


def layer_states(encoder: AnyEncoder, batch: Batch) -> list[Float[Tensor, "tokens hidden"]]:
    """Return the D hidden states, from the embeddings to the last layer's output."""
    if isinstance(encoder, TwoStreamEncoder):
        return [streams.content for streams in encoder.states(batch)]
    return list(encoder.states(batch))


def _forward_pass_groups(rows: Sequence[TokenRow]) -> Iterator[Sequence[TokenRow]]:
    """Yield groups of consecutive rows for one forward pass each."""
    first = tokens = 0
    for index, row in enumerate(rows):
        if tokens and tokens + len(row) > _BATCH_TOKENS:
            yield rows[first:index]
            first, tokens = index, 0
        tokens += len(row)
    if rows:
        yield rows[first:]


def _make_batch(frozen: FrozenEncoder, rows: Sequence[TokenRow]) -> Batch:
    batch = batch_without_targets(torch.from_numpy(np.concatenate(rows)), [len(row) for row in rows])
    segments = torch.zeros_like(batch.tokens)
    if frozen.class_token_last:
        segments[batch.cu_seqlens[1:].long() - 1] = _CLASS_SEGMENT_ID
    return replace(batch, segments=segments)


def _pool_states(
    frozen: FrozenEncoder, states_DTH: Float[Tensor, "depths tokens hidden"], batch: Batch, pooling: Pooling
) -> Float[Tensor, "depths rows hidden"]:
    ends, lengths = batch.cu_seqlens.long(), batch.cu_seqlens.diff()
    match pooling:
        case "cls":
            return states_DTH[:, ends[1:] - 1 if frozen.class_token_last else ends[:-1]]
        case "mean":
            row_T = torch.repeat_interleave(torch.arange(batch.rows), lengths)
            sums = torch.zeros(len(states_DTH), batch.rows, states_DTH.shape[2])
            return sums.index_add_(1, row_T, states_DTH) / lengths[:, None]
        case "max":
            parts = torch.split(states_DTH, lengths.tolist(), dim=1)
            return torch.stack([part.amax(1) for part in parts], dim=1)
        case _ as never:
            assert_never(never)
