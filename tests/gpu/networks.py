"""Networks that tests train on random rows: a recipe's own, in full size on a GPU and small on a CPU."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from encoder_core.batch import Batch, batch_without_targets
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.layers.pieces import Pieces, compile_layers
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.train.engine import Engine, Update
from encoder_core.train.settings import EngineConfig, Precision
from encoder_core.train.step import Microbatch, RankBatch, accumulate_gradients
from launcher.runtime.capacity.workload import targets_per_row_in_phase
from launcher.runtime.rank.build import build_optimizer
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import with_vocab
from launcher.runtime.recipe.tiny import tiny
from tests.gpu.machine import GPU

_RATES = ("dropout", "attention_dropout", "attention_output_dropout", "embedding_dropout")
_SEED = 3
_VOCABULARY = 1024
_FIRST = 8  # ids below are special tokens


def recipe_of(name: str, *, dropout: float | None = None) -> Recipe:
    """Return the recipe with a known vocabulary, in its small form on a CPU. `dropout` replaces all of its rates;
    None keeps them.
    """
    if not GPU:
        return small(name, dropout)
    recipe = load(name)
    return with_dropout(recipe.model_copy(update={"model": with_vocab(recipe.model)}), dropout)


def small(name: str, dropout: float | None = None) -> Recipe:
    """Return the recipe in a form that trains in seconds on a CPU, with a small vocabulary."""
    recipe = tiny(load(name))
    model = recipe.model.model_copy(update={"vocab": _VOCABULARY})
    return with_dropout(recipe.model_copy(update={"model": model}), dropout)


def with_dropout(recipe: Recipe, rate: float | None) -> Recipe:
    if rate is None:
        return recipe
    model = recipe.model
    return recipe.model_copy(
        update={"model": model.model_copy(update={name: rate for name in _RATES if hasattr(model, name)})}
    )


@contextmanager
def joined(device: torch.device, folder: Path) -> Iterator[None]:
    """Join torch's process group by oneself, which DeepSpeed needs. `folder` takes the file of the meeting."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def built(recipe: Recipe, pieces: Pieces | None = None) -> ObjectiveModule:
    """Build the recipe's network with fresh weights that are the same on any machine."""
    model = objective_module(recipe.model, recipe.objective, recompute=recipe.activation_checkpointing)
    torch.manual_seed(_SEED)
    initialise(model, recipe.model.initializer_range, recipe.model.initializer)
    compile_layers(model, pieces)
    return model


def engine_of(recipe: Recipe, stage: int, precision: Precision, pieces: Pieces | None = None) -> Engine:
    """Return an engine on this process's device: a GPU if it sees one. Stage 3 shards even the smallest parameter."""
    model = built(recipe, pieces)
    clip, smallest = recipe.optimizer.settings.clip, 0 if stage == 3 else None
    config = EngineConfig(stage, precision, clip, smallest)  # type: ignore[arg-type]
    return Engine(model, build_optimizer(recipe, model), config)


def random_rows(recipe: Recipe, lengths: Sequence[int], seed: int, device: torch.device, first: int = 0) -> Batch:
    """Return rows of random ids, with as many targets as in the recipe's first phase, and all else that its objective
    reads.

    `first` is the number of the first row in its step.
    """
    phase = recipe.phases[0]
    draws = torch.Generator().manual_seed(seed)
    count, vocabulary = sum(lengths), recipe.model.vocabulary_size
    tokens = torch.randint(min(_FIRST, vocabulary - 1), vocabulary, (count,), generator=draws)
    share = targets_per_row_in_phase(recipe, phase) / phase.length
    targets = torch.randperm(count, generator=draws)[: max(1, round(share * count))].sort().values
    second = torch.cat([torch.arange(length) >= length // 2 for length in lengths]).long()
    order = None
    if recipe.objective.plm is not None:  # targets come last, in an order of their own
        order = torch.zeros_like(tokens)
        order[targets] = 1 + torch.randperm(len(targets), generator=draws)
    languages = second if hasattr(recipe.model, "languages") else None
    denoise = recipe.objective.denoise
    fewer = [] if denoise is None else [denoise.mean_form_tokens(length) for length in lengths]
    return replace(
        batch_without_targets(tokens, lengths),
        target_positions=targets,
        target_ids=tokens[targets],
        segments=second,
        languages=languages,
        pair_labels=torch.randint(2, (len(lengths),), generator=draws),
        order=order,
        numbers=torch.arange(first, first + len(lengths)),
        causal=denoise is not None,
        corrupted=batch_without_targets(tokens[: sum(fewer)], fewer) if fewer else None,
    ).to(device)


def uneven(recipe: Recipe, rows: int, length: int) -> list[int]:
    """Return lengths of rows from `length` down to a quarter of it; all are `length` if the model carries memory from
    row to row.
    """
    if isinstance(recipe.model, XlnetConfig):
        return [length] * rows
    return [length - (length * 3 // 4) * row // max(1, rows - 1) for row in range(rows)]


@dataclass(frozen=True)
class Steps:
    """Steps of training on random rows, which are the same on any device.

    Attributes:
        microbatches: number of microbatches in a step.
        rows, length: number of rows in a microbatch, and tokens in a row.
        even: whether all rows are `length` long; otherwise they shrink to a quarter of it.
    """

    recipe: Recipe
    microbatches: int
    rows: int
    length: int
    even: bool = False

    def work(self, engine: Engine, step: int) -> RankBatch:
        full = [self.length] * self.rows
        lengths = full if self.even else uneven(self.recipe, self.rows, self.length)
        batches = tuple(
            Microbatch(at, random_rows(self.recipe, lengths, 1000 * step + at, engine.device, at * self.rows))
            for at in range(self.microbatches)
        )
        return RankBatch(step, batches, self.microbatches)

    def counts(self, engine: Engine, work: RankBatch) -> dict[str, float]:
        """Return the number of targets in the step, by loss term."""
        objective = engine.objective
        assert isinstance(objective, ObjectiveModule)
        counts: Counter[str] = Counter()
        for microbatch in work.microbatches:
            counts.update(objective.target_counts(microbatch.batch))
        return {name: float(count) for name, count in counts.items()}

    def take(self, engine: Engine, step: int) -> tuple[dict[str, float], Update]:
        """Take one step; return this rank's sums, and the update of the last update group."""
        work = self.work(engine, step)
        counts, memories = self.counts(engine, work), dict[int, tuple[Tensor, ...]]()
        sums: dict[str, float] = {}
        update = Update(False, 0.0)
        rate = self.recipe.optimizer.settings.lr
        for group in engine.update_groups:
            sums |= accumulate_gradients(engine, work, counts, _SEED, memories, group)
            update = engine.update(rate, step + 1, group)
        return sums, update


def losses(sums: dict[str, float]) -> dict[str, float]:
    """Return the mean loss of each term."""
    return {
        name.removesuffix("_loss"): value / max(1.0, sums[f"{name.removesuffix('_loss')}_targets"])
        for name, value in sums.items()
        if name.endswith("_loss")
    }
