"""XLNet's memory of earlier tokens: recomputed at fixed steps, and saved in checkpoints of all other steps.

The memory of a logical microbatch is kept as the module returned it: for each layer [R, C, H], with R rows of the
microbatch, C carried tokens, H hidden. A lane keeps its place in the batch, and a rank its microbatches. So memory does
not move between ranks as long as their number stays.

At fixed steps every run forgets its memory and recomputes it from the steps before. There memory is a function of
weights and data, so a checkpoint of such a step needs none. A checkpoint of another step holds it as tensors
"memory.<layer>" of [lanes, C, H], of which each rank writes its microbatches' ranges. Any number of ranks can resume
from them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from encoder_core.batch import Batch
from encoder_core.train.engine import Engine
from encoder_core.train.memory_schedule import MEMORY
from encoder_core.train.step import Memories, RankBatch
from encoder_core.train.zero_state import Fragment, Read

Shapes = Mapping[str, tuple[int, ...]]


def recall(engine: Engine, before: Sequence[RankBatch], memories: Memories) -> None:
    """Forget all memory and recompute it from the steps `before`, in order, with the present weights and without
    dropout. Collective.
    """
    memories.clear()
    engine.training(False)
    with torch.no_grad():
        for work in before:
            for i in range(work.rounds(engine.world)):
                microbatch = work.microbatch(i, engine.device)
                losses = engine(_unpredicted(microbatch.batch), memories.pop(microbatch.index, ()))
                if losses.memory:
                    memories[microbatch.index] = losses.memory


def _unpredicted(batch: Batch) -> Batch:
    """The batch without targets. Memory holds states of the content stream, which do not depend on predictions."""
    none = batch.target_ids[:0]
    return replace(batch, target_positions=none, target_ids=none)


@dataclass(frozen=True)
class Carried:
    """Memory as a checkpoint holds it.

    Attributes:
        fragments: this rank's, fp32.
        shapes: of the whole tensors, by name. Rank 0's are used, because it has a microbatch in every step.
    """

    fragments: tuple[Fragment, ...] = ()
    shapes: Shapes = field(default_factory=dict)


def carry(memories: Memories, microbatches: int) -> Carried:
    """The memory of a batch of `microbatches` logical microbatches, equally many rows each."""
    fragments: list[Fragment] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for index, memory in sorted(memories.items()):
        for layer, tensor in enumerate(memory):
            flat = tensor.detach().cpu().float().flatten()
            fragments.append(Fragment(_name(layer), index * len(flat), {MEMORY: flat}))
            shapes[_name(layer)] = (microbatches * tensor.shape[0], *tensor.shape[1:])
    return Carried(tuple(fragments), shapes)


def restore(
    memories: Memories, shapes: Shapes, read: Read, microbatches: Sequence[int], rows: int, engine: Engine
) -> None:
    """Read the memory of this rank's logical `microbatches`, of `rows` rows, from a checkpoint that carries some.

    What was computed in bf16 comes back as the same bits.
    """
    dtype = torch.bfloat16 if engine.config.precision == "bf16" else torch.float32
    for index in microbatches:
        memories[index] = tuple(
            _rows(shapes[_name(layer)], read, _name(layer), index * rows, rows).to(engine.device, dtype)
            for layer in range(len(shapes))
        )


def _rows(shape: tuple[int, ...], read: Read, name: str, first: int, rows: int) -> torch.Tensor:
    size = math.prod(shape[1:])
    return read(name, MEMORY, first * size, (first + rows) * size).view(rows, *shape[1:])


def _name(layer: int) -> str:
    return f"{MEMORY}.{layer}"
