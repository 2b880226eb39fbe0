"""Contrastive steps on ranks, alone and beside other terms; importable by name, as `run_ranks` needs."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from encoder_core.batch import Batch
from encoder_core.families.bert import BertConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.compose import compose
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.text_vectors import ContrastiveModel, WithVectors
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.sentence_pairs import SopConfig
from encoder_core.objectives.term import TermConfig
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import RankGroup
from encoder_core.train.metrics import evaluate
from encoder_core.train.settings import EngineConfig
from encoder_core.train.step import Microbatch, RankBatch, accumulate_gradients, gather_sums
from tests.support.ranks.fragments import Piece
from tests.support.ranks.small_training import small_engine

SEED, VOCAB, MASK = 5, 60, 4
EXAMPLES = 32
PLAIN = ContrastiveConfig()
BESIDE: Mapping[str, dict[str, TermConfig]] = {
    "nothing": {},
    "mlm": {"mlm": MlmConfig()},
    "sop": {"mlm": MlmConfig(), "sop": SopConfig()},
    "rtd": {"mlm": MlmConfig(), "rtd": ReplacedTokenConfig()},
}
BERT = BertConfig(layers=2, hidden=16, heads=2, feed_forward=32, max_length=16, vocab=VOCAB, initializer_range=0.1)
WIDE = BertConfig(layers=4, hidden=128, heads=4, feed_forward=512, max_length=64, vocab=VOCAB)


@dataclass(frozen=True)
class Case:
    """One way to make one and the same step, in fp64.

    Attributes:
        microbatch: examples of one.
        group: texts of an example. Beside other terms it is the text of a row, twice.
        beside: other terms, by a name of `BESIDE`; with them there is dropout, which makes the two vectors differ.
    """

    microbatch: int
    objective: ContrastiveConfig = PLAIN
    group: int = 2
    beside: str = "nothing"

    @property
    def model(self) -> BertConfig:
        rate = 0.0 if self.beside == "nothing" else 0.2
        return BERT.model_copy(update={"dropout": rate, "attention_dropout": rate})

    def rows(self, first: int, last: int) -> Batch:
        """Examples `first` to `last` - 1 of the one batch, as many as there are."""
        last = min(last, EXAMPLES)
        if self.beside == "nothing":
            return to_rows(examples(self.group)[first:last])
        return masked_rows([example[0] for example in examples(2)], first, last)


@dataclass(frozen=True)
class Outcome:
    """Of one case on one rank: sums over all ranks, held-out figures, and the whole gradient."""

    sums: dict[str, float]
    heldout: dict[str, float]
    gradient: list[Piece]


def first_steps(rank: int, world: int, cases: list[Case]) -> list[Outcome]:
    control = RankGroup.join()
    return [_step(control, case) for case in cases]


def _step(control: RankGroup, case: Case) -> Outcome:
    objective, work = fresh_model(case), share(control, case)
    counts = {name: float(n) for name, n in objective.target_counts(case.rows(0, EXAMPLES)).items()}
    optimizer = AdamW(parameter_groups(objective, 0.0), AdamWConfig(lr=1e-3, clip=None))
    engine = small_engine(objective, optimizer, 0)
    _double(objective, engine)
    sums = gather_sums(control, accumulate_gradients(engine, work, counts, SEED, {}))
    gradient = [
        (name, 0, {"gradient": p.grad.flatten().numpy().copy()})
        for name, p in objective.named_parameters()
        if p.grad is not None
    ]
    # The held-out rows are those of the step; a rank that has fewer microbatches idles at the end.
    rows = (work.microbatch(i, torch.device("cpu")) for i in range(work.round_count(control.world)))
    return Outcome(sums, evaluate(engine, control, rows, SEED), gradient)


def _double(objective: ContrastiveModel | WithVectors, engine: Engine) -> None:
    """DeepSpeed takes no model in fp64, nor adds up such gradients on a CPU, and yet can do both at stage 0."""
    objective.double()
    engine._engine.communication_data_type = torch.float64
    get_accelerator().supported_dtypes = lambda: [torch.float64]


def fresh_model(case: Case) -> ContrastiveModel | WithVectors:
    torch.manual_seed(SEED)
    model = compose(case.model, {**BESIDE[case.beside], "contrastive": case.objective})
    assert isinstance(model, ContrastiveModel | WithVectors)
    initialise(model, BERT.initializer_range)
    return model


def share(control: RankGroup, case: Case) -> RankBatch:
    """This rank's microbatches of the one batch."""
    size, total = case.microbatch, -(-EXAMPLES // case.microbatch)
    mine = (Microbatch(i, case.rows(i * size, (i + 1) * size)) for i in range(control.rank, total, control.world))
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


def masked_rows(texts: list[torch.Tensor], first: int, last: int) -> Batch:
    """Rows of which every third token is hidden, with a pair label each."""
    batch = to_rows([[text] for text in texts[first:last]])
    targets = (batch.positions % 3 == 1).nonzero().flatten()
    hidden = torch.where(batch.tokens[targets] % 2 == 0, MASK, 7)
    return replace(
        batch,
        tokens=batch.tokens.index_copy(0, targets, hidden),
        target_positions=targets,
        target_ids=batch.tokens[targets],
        pair_labels=torch.arange(first, last) % 2,
        numbers=torch.arange(first, last),
    )


def broken_step(rank: int, world: int, value: float) -> tuple[bool, bool]:
    """With `value` in one vector of rank 1's first pass: whether the loss is finite, and whether weights moved."""
    control, case = RankGroup.join(), Case(8)
    objective = fresh_model(case)
    assert isinstance(objective, ContrastiveModel)
    optimizer = AdamW(parameter_groups(objective, 0.0), AdamWConfig(lr=1e-3))
    engine = Engine(objective, optimizer, EngineConfig(1, "fp32", 1.0))
    embed = objective.embed

    def spoilt(batch: Batch) -> torch.Tensor:
        vectors = embed(batch)
        return vectors if rank == 0 or torch.is_grad_enabled() else vectors.index_fill(2, torch.tensor(3), value)

    objective.embed = spoilt  # type: ignore[method-assign]
    work = share(control, case)
    counts = {"contrastive": float(EXAMPLES)}
    sums = gather_sums(control, accumulate_gradients(engine, work, counts, SEED, {}))
    return math.isfinite(sums["contrastive_loss"]), engine.update(1e-3, 1).applied


def peak_of_step(rank: int, world: int, pairs: int, microbatch: int) -> int:
    """Bytes that this process had at most in a step, over what it had before."""
    objective = compose(WIDE, {"contrastive": PLAIN})
    initialise(objective, 0.1)
    optimizer = AdamW(parameter_groups(objective, 0.0), AdamWConfig(lr=1e-3))
    engine = Engine(objective, optimizer, EngineConfig(1, "fp32", 1.0))
    text = torch.arange(WIDE.max_length) % VOCAB
    microbatches = tuple(
        Microbatch(index, to_rows([[text, text]] * microbatch)) for index in range(pairs // microbatch)
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before = psutil.Process().memory_info().rss
    work = RankBatch(0, microbatches, len(microbatches))
    accumulate_gradients(engine, work, {"contrastive": float(pairs)}, SEED, {})
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1]) * 1024 - before
