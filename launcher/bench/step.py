"""`maskfleet bench step`: one training step of ours against transformers' RoBERTa, in the same process.

Same weights, batch, dropout rates, threads and optimizer; fp32 on the CPU, full rows. The peer is timed as it
ships (its head scores every position) and with its head on the masked positions only. Rounds interleave the
three, so that a busy machine slows all of them, and medians are compared.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families import roberta
from encoder_core.families.hf.interchange import interchange
from encoder_core.families.roberta import RobertaConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.mlm import MaskedLanguageModel, masked_language_model
from launcher.bench.errors import BenchError

Size = Literal["small", "base"]

SMALL = RobertaConfig(layers=4, hidden=256, heads=4, feed_forward=1024, vocab=50_265)
MASKED = 0.15
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Setting:
    """What is measured.

    `rows` x `length` tokens a step; `rounds` timed steps of each side after a warm-up.
    """

    config: RobertaConfig
    rows: int
    length: int
    rounds: int
    threads: int


@dataclass(frozen=True)
class Comparison:
    """Median seconds a step, and the gap between the two sides' losses before training, dropout off."""

    setting: Setting
    ours: float
    peer: float
    peer_masked: float
    loss_gap: float

    @property
    def ratio(self) -> float:
        return self.peer / self.ours

    @property
    def ratio_masked(self) -> float:
        return self.peer_masked / self.ours


def setting(size: Size, rounds: int = 5, threads: int = 1) -> Setting:
    """4 layers of 256 at 32 x 128 tokens, or RoBERTa-base at 4 x 512; both with the 50k vocabulary."""
    match size:
        case "small":
            return Setting(SMALL, rows=32, length=128, rounds=rounds, threads=threads)
        case "base":
            return Setting(roberta.BASE, rows=4, length=512, rounds=rounds, threads=threads)
        case _:
            assert_never(size)


def bench_step(setting: Setting, progress: Callable[[str], None] = print) -> Comparison:
    """Measure. Raises BenchError where transformers is not installed."""
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    ours, theirs = _models(setting.config)
    batch = _batch(setting)
    gap = _loss_gap(ours, theirs, batch)
    sides = {
        "ours": _stepper(ours, lambda: _our_loss(ours, batch)),
        "peer": _stepper(theirs, lambda: _their_loss(theirs, batch)),
        "peer_masked": _stepper(theirs, lambda: _their_masked_loss(theirs, batch)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(setting.rounds + 1):
        for name, step in sides.items():
            start = time.perf_counter()
            step()
            if i:
                seconds[name].append(time.perf_counter() - start)
        progress(f"round {i} of {setting.rounds}" if i else "warmed up")
    return Comparison(setting, **{name: statistics.median(s) for name, s in seconds.items()}, loss_gap=gap)


def render(result: Comparison) -> str:
    """A few lines for people."""
    s, c = result.setting, result.setting.config
    tokens = s.rows * s.length
    lines = [
        f"{c.layers} layers x {c.hidden}, vocabulary {c.vocab:,}, {s.rows} x {s.length} tokens, "
        f"{s.threads} thread(s), fp32, dropout {c.dropout} and {c.attention_dropout} on attention",
        f"difference of the two losses before training, dropout off: {result.loss_gap:.1e}",
        f"{'maskfleet':<42}{result.ours:>8.3f} s {tokens / result.ours:>9,.0f} tokens/s",
    ]
    for name, seconds in (
        ("transformers", result.peer),
        ("transformers, head on masked positions only", result.peer_masked),
    ):
        ratio = f"{seconds / result.ours:.2f} x"
        lines.append(f"{name:<42}{seconds:>8.3f} s {tokens / seconds:>9,.0f} tokens/s   {ratio:>8}")
    return "\n".join(lines)


def _models(config: RobertaConfig) -> tuple[MaskedLanguageModel, Any]:
    """The two sides with the same weights, in training mode."""
    try:
        import transformers
    except ImportError as error:
        raise BenchError(
            "the peer of `bench step`, transformers, is not installed",
            remedy="pip install -c infra/constraints.txt transformers",
        ) from error
    ours = masked_language_model(config)
    initialise(ours)
    their = interchange(config)
    fields = transformers.RobertaConfig(**their.fields, attn_implementation="sdpa")
    theirs = transformers.RobertaForMaskedLM(fields)
    parameters = dict(ours.named_parameters())
    state = {name: parameters[own].detach() for own, name in their.table.names(their.layers).items()}
    zeros = {fold.theirs: torch.zeros(1, config.hidden) for fold in their.table.folds}
    theirs.load_state_dict(state | zeros, strict=False)
    return ours.train(), theirs.train()


def _batch(setting: Setting) -> Batch:
    count = setting.rows * setting.length
    vocab = setting.config.vocabulary
    targets = torch.randperm(count)[: round(MASKED * count)].sort().values
    return Batch(
        tokens=torch.randint(5, vocab, (count,)),
        cu_seqlens=torch.arange(0, count + 1, setting.length, dtype=torch.int32),
        max_length=setting.length,
        positions=torch.arange(setting.length).repeat(setting.rows),
        target_positions=targets,
        target_ids=torch.randint(5, vocab, (len(targets),)),
    )


def _stepper(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _our_loss(model: MaskedLanguageModel, batch: Batch) -> Tensor:
    term = model(batch).terms[0]
    loss: Tensor = term.loss_sum / term.targets
    return loss


def _their_inputs(batch: Batch) -> dict[str, Tensor]:
    shape = (batch.rows, batch.max_length)
    return {"input_ids": batch.tokens.view(shape), "attention_mask": torch.ones(shape, dtype=torch.int64)}


def _their_loss(model: Any, batch: Batch) -> Tensor:
    labels = torch.full_like(batch.tokens, -100)
    labels[batch.target_positions] = batch.target_ids
    inputs = _their_inputs(batch)
    loss: Tensor = model(**inputs, labels=labels.view_as(inputs["input_ids"])).loss
    return loss


def _their_masked_loss(model: Any, batch: Batch) -> Tensor:
    hidden = model.roberta(**_their_inputs(batch)).last_hidden_state.flatten(0, 1)
    return F.cross_entropy(model.lm_head(hidden[batch.target_positions]), batch.target_ids)


def _loss_gap(ours: MaskedLanguageModel, theirs: Any, batch: Batch) -> float:
    ours.eval()
    theirs.eval()
    with torch.no_grad():
        gap = abs(_our_loss(ours, batch) - _their_loss(theirs, batch)).item()
    ours.train()
    theirs.train()
    return gap
