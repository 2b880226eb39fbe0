"""A small masked language model trained for real: engine, steps and state, on synthetic microbatches."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from encoder_core.batch import Batch
from encoder_core.families.roberta import RobertaConfig
from encoder_core.layers.dropout import dropout
from encoder_core.layers.initialise import initialise
from encoder_core.layers.kernel_choice import force_kernel
from encoder_core.objectives.modules.losses import LossSums
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.random_draws import DRAW_VALUES
from encoder_core.train.engine import Engine, Update
from encoder_core.train.exchange import RankGroup
from encoder_core.train.settings import EngineConfig, Precision
from encoder_core.train.step import Microbatch, RankBatch, accumulate_gradients, gather_sums
from encoder_core.train.zero_memory import Stage
from encoder_core.train.zero_state import KINDS, MASTER
from tests.support.ranks.fragments import Piece, Whole, pieces, whole

VOCAB, MICROBATCHES, SEED = 61, 3, 5
BUCKET = 700  # numbers: gradients of a small model make many buckets, and some are larger than one
CONFIG = RobertaConfig(layers=2, hidden=32, heads=2, feed_forward=64, max_length=32, vocab=VOCAB)


@dataclass(frozen=True)
class Setting:
    """One way to run: ZeRO stage and precision. Stage 3 shards even the smallest parameter."""

    stage: Stage
    precision: Precision = "fp32"
    clip: float | None = 1.0
    reduce_dtype: Precision = "fp32"
    bucket: int = BUCKET
    decay: float | None = None


@dataclass(frozen=True)
class Trace:
    """What one rank saw: per step (mean loss, gradient norm, applied), and its fragments."""

    steps: list[tuple[float, float, bool]]
    fragments: list[Piece]
    shapes: dict[str, tuple[int, ...]]


def train(
    rank: int,
    world: int,
    settings: list[Setting],
    first: int,
    stop: int,
    states: list[Whole] | None = None,
    poisoned: int | None = None,
    limits: dict[int, float] | None = None,
) -> list[Trace]:
    """Steps [first, stop) under each setting, from `states` if given; step `poisoned` gets a NaN gradient; `limits`
    are the largest norms of some steps."""
    control = RankGroup.join()
    return [
        _train_one(control, setting, first, stop, states[i] if states else None, poisoned, limits or {})
        for i, setting in enumerate(settings)
    ]


def train_fused(rank: int, world: int, settings: list[Setting], interpreted: bool) -> tuple[list[Trace], list[Trace]]:
    """A step with norms as written, and by the kernel of residual, dropout and norm; or without Triton's interpreter,
    which is slow, by the formula in its place."""
    from encoder_core.kernels import residual_norm
    from encoder_core.layers import residual

    launched, kernel = [], residual_norm.residual_norm

    def computed(x: Tensor, by: Tensor, norm: Any, draws: Tensor | None, threshold: int) -> tuple[Tensor, Tensor]:
        launched.append(len(norm.weight))  # its numbers are here
        if interpreted:
            return kernel(x, by, norm, draws, threshold)
        zero = torch.zeros((), dtype=torch.int64)
        total = by + (x if draws is None else dropout(x, threshold / DRAW_VALUES, draws, zero))
        return total, nn.functional.layer_norm(total, x.shape[1:], norm.weight, norm.bias, norm.eps)

    residual_norm.residual_norm = computed  # type: ignore[assignment]  # one without the shapes
    residual._supports = lambda *_: True
    written = train(rank, world, settings, 0, 1)
    assert not launched
    with force_kernel("fused", "norm"):
        fused = train(rank, world, settings, 0, 1)
    assert set(launched) == {CONFIG.hidden}
    return written, fused


def assemble(traces: list[Trace]) -> Whole:
    """All ranks' fragments as whole parameters; fails where an element is missing or held twice."""
    return whole((trace.fragments for trace in traces), traces[0].shapes)


def distance(a: Whole, b: Whole) -> float:
    """Largest difference of master weights."""
    return max(float(np.abs(a[name][MASTER] - b[name][MASTER]).max()) for name in a)


def identical(a: Whole, b: Whole) -> bool:
    return all(np.array_equal(a[name][kind], b[name][kind]) for name in a for kind in a[name])


def fresh_model(seed: int = SEED) -> "Poisonable":
    torch.manual_seed(seed)
    model = Poisonable()
    initialise(model)
    return model


class Poisonable(nn.Module):
    """The model, and a way to make one step's gradient NaN on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.model = masked_language_model(CONFIG)
        self.factor = 1.0

    def forward(self, batch: Batch) -> LossSums:
        losses: LossSums = self.model(batch)
        terms = tuple(replace(term, loss_sum=term.loss_sum * self.factor) for term in losses.terms)
        return replace(losses, terms=terms)


def _train_one(
    control: RankGroup,
    setting: Setting,
    first: int,
    stop: int,
    state: Whole | None,
    poisoned: int | None,
    limits: dict[int, float],
) -> Trace:
    model = fresh_model()
    engine = engine_of(model, setting)
    if state is not None:
        engine.restore(KINDS, lambda name, kind, start, end: torch.from_numpy(state[name][kind][start:end]))
    steps = []
    for number in range(first, stop):
        model.factor = float("nan") if number == poisoned else 1.0
        loss, update = step_of(engine, control, number, limits.get(number, math.inf))
        steps.append((loss, update.grad_norm, update.applied))
    return Trace(steps, pieces(engine.fragments()), engine.shapes)


def engine_of(model: nn.Module, setting: Setting) -> Engine:
    optimizer = AdamW(parameter_groups(model, 0.01), AdamWConfig(lr=1e-3, betas=(0.9, 0.98)))
    return small_engine(
        model,
        optimizer,
        setting.stage,
        setting.precision,
        clip=setting.clip,
        reduce_dtype=setting.reduce_dtype,
        bucket=setting.bucket,
        decay=setting.decay,
    )


def small_engine(
    model: nn.Module,
    optimizer: Optimizer,
    stage: Stage,
    precision: Precision = "fp32",
    *,
    clip: float | None = None,
    reduce_dtype: Precision = "fp32",
    bucket: int = BUCKET,
    decay: float | None = None,
) -> Engine:
    """An engine for a small model: many buckets, and at stage 3 even the smallest parameter is sharded."""
    threshold = 0 if stage == 3 else None
    config = EngineConfig(stage, precision, clip, threshold, reduce_dtype, bucket)
    return Engine(model, optimizer, config, decay)


def step_of(engine: Engine, control: RankGroup, number: int, largest_norm: float = math.inf) -> tuple[float, Update]:
    mine = tuple(microbatch(number, i) for i in range(MICROBATCHES) if i % control.world == control.rank)
    work = RankBatch(number, mine, MICROBATCHES)
    targets = sum(m.batch.target_ids.numel() for m in mine)
    count = float(control.gather_rows([targets]).sum())
    sums = accumulate_gradients(engine, work, {"mlm": count}, SEED, {})
    update = engine.update(1e-3, number + 1, largest_norm=largest_norm)
    sums = gather_sums(control, sums)
    return sums["mlm_loss"] / sums["mlm_targets"], update


def microbatch(step: int, index: int) -> Microbatch:
    """Two rows of different lengths, a third of their tokens targets; the same for a step and index everywhere."""
    draws = torch.Generator().manual_seed(1000 * step + index)
    lengths = torch.tensor([12 + index, 20])
    tokens = torch.randint(5, VOCAB, (int(lengths.sum()),), generator=draws)
    targets = torch.arange(index, len(tokens), 3)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    return Microbatch(
        index,
        Batch(tokens, ends.int(), int(lengths.max()), positions, targets, (tokens[targets] + 1) % VOCAB),
    )
