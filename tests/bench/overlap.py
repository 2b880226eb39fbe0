"""A step whose gradients are added up during the backward pass against one that does so afterwards:
python tests/bench/overlap.py. ZeRO 1 in bf16, ranks on this machine, steps of both sides in turns.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import torch.distributed as dist
import typer
from program import note, run
from step_batch import make_batch
from torch.multiprocessing.spawn import spawn

from encoder_core.families.roberta import BASE
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.network import masked_language_model
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.train.engine import Engine
from encoder_core.train.settings import EngineConfig
from encoder_core.train.step import Microbatch, RankBatch, accumulate

SMALL = {"layers": 4, "hidden": 512, "heads": 8, "feed_forward": 2048, "vocab": 8000}


def engine() -> Engine:
    """Of a small RoBERTa, with a fresh one each."""
    torch.manual_seed(1)
    config = BASE.model_copy(update=SMALL)
    model = masked_language_model(config)
    initialise(model)
    optimizer = AdamW(parameter_groups(model, 0.01), AdamWConfig(lr=1e-4))
    return Engine(model, optimizer, EngineConfig(1, "bf16", clip=1.0))


def timed(rank: int, world: int, rounds: int, rows: int) -> dict[str, list[float]]:
    """Seconds of each step, by side. One microbatch a rank: nothing hides the sums but its own backward pass."""
    torch.set_num_threads(1)
    sides = {"during": engine()}
    with patch.object(EngineConfig, "sums_apart", False):  # then DeepSpeed does it
        sides["after"] = engine()
    batch = make_batch([128] * rows, SMALL["vocab"])
    work = {side: RankBatch(0, (Microbatch(rank, batch),), world) for side in sides}
    counts = {"mlm": float(batch.target_ids.numel() * world)}
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, own in sides.items():
            dist.barrier()
            began = time.perf_counter()
            accumulate(own, work[side], counts, 1, {})
            own.update(1e-4, number + 1)
            found[side].append(time.perf_counter() - began)
    return {side: seconds[1:] for side, seconds in found.items()}


def _rank(rank: int, world: int, rounds: int, rows: int, folder: str) -> None:
    """A process of its own; the first one leaves what it found in `folder`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}  # DeepSpeed insists
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    found = timed(rank, world, rounds, rows)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def overlap(
    ranks: Annotated[int, typer.Option(min=2, help="Processes on this machine.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each side.")] = 9,
    rows: Annotated[int, typer.Option(min=1, help="Of 128 tokens, of each rank.")] = 4,
) -> None:
    """Medians of seconds a step, and the ratio of steps that were taken one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, rounds, rows, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        found = json.loads(Path(folder, "found.json").read_text())
    ratios = [during / after for during, after in zip(found["during"], found["after"], strict=True)]
    for side, seconds in found.items():
        note(f"{side:>7} the backward pass: {statistics.median(seconds):.3f} s a step")
    note(f"during / after: {statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    run(overlap)
