"""Contrastive steps on ranks, in one way after the other; importable by name, as `run_ranks` needs."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from deepspeed.accelerator import get_accelerator

from encoder_core.batch import Batch
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.encoder import checkpoint_activations
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.objectives.modules.text_vectors import ContrastiveModel
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import Control
from encoder_core.train.metrics import evaluate
from encoder_core.train.settings import EngineConfig
from encoder_core.train.step import Microbatch, RankBatch, accumulate, gather_sums
from encoder_core.train.zero_memory import Stage
from tests.support.ranks.fragments import Piece, kind_of, pieces
from tests.support.ranks.small_training import small_engine

SEED, VOCAB = 5, 60
EXAMPLES = 32
PLAIN = ContrastiveConfig()
BERT = BertConfig(
    layers=2,
    hidden=16,
    heads=2,
    feed_forward=32,
    max_length=16,
    vocab=VOCAB,
    dropout=0.0,
    attention_dropout=0.0,
    initializer_range=0.1,
)
WIDE = BertConfig(layers=4, hidden=128, heads=4, feed_forward=512, max_length=64, vocab=VOCAB)


@dataclass(frozen=True)
class Case:
    """One way to make one and the same step.

    Attributes:
        microbatch: examples of one.
        group: texts of an example.
        double: in fp64, else in fp32.
    """

    microbatch: int
    objective: ContrastiveConfig = PLAIN
    group: int = 2
    stage: Stage = 0
    double: bool = False
    model: ModelConfig = BERT


@dataclass(frozen=True)
class Outcome:
    """Of one case on one rank: sums over all ranks, held-out figures, and this rank's ranges of the gradient."""

    sums: dict[str, float]
    heldout: dict[str, float]
    gradient: list[Piece]


def first_steps(rank: int, world: int, cases: list[Case]) -> list[Outcome]:
    control = Control.join()
    return [_step(control, case) for case in cases]


def _step(control: Control, case: Case) -> Outcome:
    objective = fresh_model(case)
    counts = dict.fromkeys(objective.terms, float(EXAMPLES))
    return outcome_of(objective, control, share(control, case), counts, case.stage, double=case.double)


def outcome_of(
    objective: ObjectiveModule,
    control: Control,
    work: RankBatch,
    counts: Mapping[str, float],
    stage: Stage,
    *,
    double: bool,
) -> Outcome:
    """Of one step of a fresh model on this rank's microbatches. `counts`: targets of all ranks, by term."""
    optimizer = AdamW(parameter_groups(objective, 0.0), AdamWConfig(lr=1e-3, clip=None))
    engine = small_engine(objective, optimizer, stage)
    if double:
        _double(objective, engine)
    sums = gather_sums(control, accumulate(engine, work, counts, SEED, {}))
    if stage == 0:
        whole = {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
        gradient = [(name, 0, {"gradient": its.flatten().numpy().copy()}) for name, its in whole.items()]
    else:
        engine.update(0.0, 1)
        moments = pieces(engine.fragments(), ["exp_avg"])
        gradient = [(name, start, {"gradient": its["exp_avg"] / (1 - 0.9)}) for name, start, its in moments]
    heldout = evaluate(engine, control, heldout_of(work, control.world), SEED)
    return Outcome(sums, heldout, gradient)


def _double(objective: ObjectiveModule, engine: Engine) -> None:
    """DeepSpeed takes no model in fp64, nor adds up such gradients on a CPU, and yet can do both at stage 0."""
    objective.double()
    engine._engine.communication_data_type = torch.float64
    get_accelerator().supported_dtypes = lambda: [torch.float64]


def named(objective: ContrastiveModel) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in objective.named_parameters() if p.requires_grad]


def heldout_of(work: RankBatch, world: int) -> Iterator[Microbatch]:
    """The step's own examples, a rank that has fewer microbatches idling at the end."""
    return (work.microbatch(i, torch.device("cpu")) for i in range(work.rounds(world)))


def assemble(outcomes: list[Outcome]) -> dict[str, np.ndarray]:
    """The whole gradient by name, from all ranks' ranges of it."""
    return kind_of((outcome.gradient for outcome in outcomes), "gradient")


def fresh_model(case: Case) -> ContrastiveModel:
    torch.manual_seed(SEED)
    model = case.objective.build(case.model)
    initialise(model, case.model.initializer_range)
    return model


def share(control: Control, case: Case) -> RankBatch:
    """This rank's microbatches of the one batch."""
    total = -(-EXAMPLES // case.microbatch)
    texts = examples(case.group)
    mine = (
        Microbatch(index, to_rows(texts[index * case.microbatch : (index + 1) * case.microbatch]))
        for index in range(control.rank, total, control.world)
    )
    return RankBatch(0, tuple(mine), total)


def examples(group: int) -> list[list[torch.Tensor]]:
    """Of random texts of 2 to 16 tokens, the same at every call. Some examples share the query, some the positive."""
    draws = torch.Generator().manual_seed(SEED)

    def text() -> torch.Tensor:
        length = int(torch.randint(2, 17, (), generator=draws))
        return torch.randint(5, VOCAB, (length,), generator=draws)

    every = [[text() for _ in range(group)] for _ in range(EXAMPLES)]
    for i in range(7, EXAMPLES, 4):
        every[i][1] = every[i - 7][i % 8 // 7]  # the positive or the query of another microbatch's example
        every[i - 1][0] = every[i - 6][0]
    return every


def to_rows(texts: list[list[torch.Tensor]]) -> Batch:
    rows = [text for example in texts for text in example]
    lengths = torch.tensor([len(row) for row in rows])
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        tokens=torch.cat(rows),
        cu_seqlens=torch.cat([none[:0].new_zeros(1), lengths.cumsum(0)]).int(),
        max_length=int(lengths.max()),
        positions=torch.cat([torch.arange(len(row)) for row in rows]),
        target_positions=none,
        target_ids=none,
        segments=torch.zeros(int(lengths.sum()), dtype=torch.int64),
        group=len(texts[0]),
    )


def broken_step(rank: int, world: int, value: float) -> tuple[bool, bool]:
    """With `value` in one vector of rank 1's first pass: whether the loss is finite, and whether weights moved."""
    control, case = Control.join(), Case(8)
    objective = fresh_model(case)
    optimizer = AdamW(parameter_groups(objective, 0.0), AdamWConfig(lr=1e-3))
    engine = Engine(objective, optimizer, EngineConfig(1, "fp32", 1.0))
    embed = objective.embed

    def spoilt(batch: Batch) -> torch.Tensor:
        vectors = embed(batch)
        return (
            vectors if rank == 0 or torch.is_grad_enabled() else vectors.index_fill(2, torch.tensor(3), value)
        )

    objective.embed = spoilt  # type: ignore[method-assign]
    work = share(control, case)
    counts = dict.fromkeys(objective.terms, float(EXAMPLES))
    sums = gather_sums(control, accumulate(engine, work, counts, SEED, {}))
    return math.isfinite(sums["contrastive_loss"]), engine.update(1e-3, 1).applied


def peak_of_step(rank: int, world: int, pairs: int, microbatch: int) -> int:
    """Bytes that this process had at most in a step, over what it had before."""
    case = Case(microbatch, model=WIDE)
    objective = fresh_model(case)
    optimizer = AdamW(parameter_groups(objective, 0.0), AdamWConfig(lr=1e-3))
    engine = Engine(objective, optimizer, EngineConfig(1, "fp32", 1.0))
    text = torch.arange(WIDE.max_length) % VOCAB
    microbatches = tuple(
        Microbatch(index, to_rows([[text, text]] * microbatch)) for index in range(pairs // microbatch)
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before = psutil.Process().memory_info().rss
    work = RankBatch(0, microbatches, len(microbatches))
    accumulate(engine, work, dict.fromkeys(objective.terms, float(pairs)), SEED, {})
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1]) * 1024 - before


def both_passes(rank: int, world: int, models: list[ModelConfig]) -> list[bool]:
    """Of each model with dropout, its activations checkpointed: whether both passes made the same vectors, which no two
    microbatches share."""
    return [_both_passes(Control.join(), model) for model in models]


def _both_passes(control: Control, model: ModelConfig) -> bool:
    case = Case(8, model=model.model_copy(update={"dropout": 0.1, "attention_dropout": 0.1}))
    objective = case.objective.build(case.model)
    checkpoint_activations(objective)
    initialise(objective, 0.1)
    optimizer = AdamW(parameter_groups(objective, 0.0), AdamWConfig(lr=1e-3))
    engine = Engine(objective, optimizer, EngineConfig(1, "fp32", 1.0))
    seen: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    embed = objective.embed

    def watched(batch: Batch) -> torch.Tensor:
        vectors = embed(batch)
        seen[torch.is_grad_enabled()].append(vectors.detach())
        return vectors

    objective.embed = watched  # type: ignore[method-assign]
    text = torch.arange(10)
    mine = range(control.rank, 4, control.world)
    batches = {index: to_rows([[text, text]] * 8) for index in mine}
    numbered = {index: replace(b, numbers=torch.arange(16) + 16 * index) for index, b in batches.items()}
    work = RankBatch(3, tuple(Microbatch(index, batch) for index, batch in numbered.items()), 4)
    accumulate(engine, work, dict.fromkeys(objective.terms, 32.0), SEED, {})
    different = torch.cat([v.flatten(0, 1) for v in seen[True]]).unique(dim=0)
    same = all(torch.equal(a, b) for a, b in zip(*seen.values(), strict=True))
    return same and len(different) == 16 * len(mine)
