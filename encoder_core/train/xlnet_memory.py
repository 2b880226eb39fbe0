"""XLNet's memory (cached states of earlier tokens): recomputed at fixed steps, and saved in checkpoints of other steps.

The memory of a logical microbatch is stored as the module returned it: for each layer [R, C, H], with R rows of the
microbatch, C memory tokens, H hidden. A lane (a text that continues from step to step) always has the same row of the
global batch, and a rank always has the same microbatches. So memory stays on its rank while their number is the same.

At fixed steps every run discards its memory and recomputes it from the preceding steps. At these steps memory is a
function of weights and data, so their checkpoints contain none. A checkpoint of another step contains it as tensors
"memory.<layer>" of [lanes, C, H]; each rank writes the ranges of its microbatches, and any number of ranks can read
them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from encoder_core.batch import Batch
from encoder_core.train.engine import Engine
from encoder_core.train.settings import MEMORY_KIND
from encoder_core.train.step import Memories, RankBatch
from encoder_core.train.zero_state import Fragment, ReadRange

Shapes = Mapping[str, tuple[int, ...]]  # shapes of a checkpoint's memory tensors, by name


def recompute_memory(engine: Engine, before: Sequence[RankBatch], memories: Memories) -> None:
    """Discard all memory and recompute it from the steps `before`, in order, with the current weights and without
    dropout. Collective.
    """
    memories.clear()
    engine.set_training(False)
    with torch.no_grad():
        for work in before:
            for i in range(work.round_count(engine.world)):
                microbatch = work.microbatch(i, engine.device)
                losses = engine(_without_targets(microbatch.batch), memories.pop(microbatch.index, ()))
                if losses.memory:
                    memories[microbatch.index] = losses.memory


def _without_targets(batch: Batch) -> Batch:
    """Return the batch without targets: memory holds the content stream's states, which do not depend on them."""
    none = batch.target_ids[:0]
    return replace(batch, target_positions=none, target_ids=none)


@dataclass(frozen=True)
class StoredMemory:
    """XLNet's memory in the form in which a checkpoint stores it.

    Attributes:
        fragments: fragments of this rank, fp32.
        shapes: shapes of the whole tensors, by name; a checkpoint takes rank 0's, since it always has microbatches.
    """

    fragments: tuple[Fragment, ...] = ()
    shapes: Shapes = field(default_factory=dict)


def stored_memory(memories: Memories, microbatches: int) -> StoredMemory:
    """Convert `memories` for a checkpoint. `microbatches`: number in the global batch, with equally many rows each."""
    fragments: list[Fragment] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for index, memory in sorted(memories.items()):
        for layer, tensor in enumerate(memory):
            flat = tensor.detach().cpu().float().flatten()
            fragments.append(Fragment(_memory_name(layer), index * len(flat), {MEMORY_KIND: flat}))
            shapes[_memory_name(layer)] = (microbatches * tensor.shape[0], *tensor.shape[1:])
    return StoredMemory(tuple(fragments), shapes)


def restore_memory(
    memories: Memories,
    shapes: Shapes,
    read: ReadRange,
    microbatches: Sequence[int],
    rows: int,
    engine: Engine,
) -> None:
    """Read the memory of this rank's logical `microbatches`, each of `rows` rows, from a checkpoint with memory.

    Memory that was computed in bf16 is restored bit for bit.
    """
    dtype = torch.bfloat16 if engine.config.precision == "bf16" else torch.float32
    for index in microbatches:
        memories[index] = tuple(
            _read_rows(shapes[_memory_name(layer)], read, _memory_name(layer), index * rows, rows).to(
                engine.device, dtype
            )
            for layer in range(len(shapes))
        )


def _read_rows(shape: tuple[int, ...], read: ReadRange, name: str, first: int, rows: int) -> torch.Tensor:
    size = math.prod(shape[1:])
    return read(name, MEMORY_KIND, first * size, (first + rows) * size).view(rows, *shape[1:])


def _memory_name(layer: int) -> str:
    return f"{MEMORY_KIND}.{layer}"
