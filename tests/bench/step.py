"""One training step of each family against transformers', in the same process: python tests/bench/step.py FAMILY.

Same weights, batch, dropout rates, threads and optimizer; fp32 on the CPU. The peer is timed as it ships (its head
scores every position, rows are padded to the longest) and with its head on the masked positions only. Rounds
interleave the three, and medians of CPU seconds are compared, so that a busy machine costs both sides alike.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, assert_never

import torch
import typer
from program import note, run
from step_batch import Lengths, make_batch, row_lengths
from step_peers import MaskedPair, Pair, PairsPair, PermutedPair, ReplacedPair
from torch import Tensor, nn

from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.xlnet import XlnetConfig
from tests.support.models import official

Family = Literal["bert", "roberta", "albert", "spanbert", "electra", "deberta", "deberta_v2", "xlnet"]
Size = Literal["small", "base"]

BASE: dict[Family, ModelConfig] = {
    "bert": official.BERT_BASE,
    "roberta": official.ROBERTA_BASE,
    "albert": official.ALBERT_BASE,
    "spanbert": official.SPANBERT_BASE,
    "electra": official.ELECTRA_BASE,
    "deberta": official.DEBERTA_BASE.model_copy(update={"mask_decoder": "plain"}),
    "deberta_v2": official.DEBERTA_V3_BASE.model_copy(update={"mask_decoder": "plain"}),
    "xlnet": official.XLNET_BASE.model_copy(update={"memory": 0, "reuse": 0}),
}
SMALL = {"layers": 4, "hidden": 256, "heads": 4, "feed_forward": 1024}
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Setting:
    """What is measured.

    `rows` of at most `length` tokens a step; `rounds` timed steps of each side after a warm-up.
    """

    family: Family
    config: ModelConfig
    rows: int
    length: int
    lengths: Lengths
    rounds: int
    threads: int


@dataclass(frozen=True)
class Comparison:
    """Median CPU seconds a step, the tokens in it, and the largest gap between the two sides' losses before
    training, dropout off. `peer_masked` is None where the peer's own head scores targets only."""

    setting: Setting
    tokens: int
    ours: float
    peer: float
    peer_masked: float | None
    loss_gap: float
    note: str

    @property
    def ratio(self) -> float:
        return self.peer / self.ours


def setting(
    family: Family,
    size: Size = "small",
    lengths: Lengths = "full",
    *,
    layers: int | None = None,
    rounds: int = 5,
    threads: int = 1,
) -> Setting:
    """4 layers of 256 at 16 x 128 tokens, or the family's base at 4 x 512, or `layers` of its layers; both with the
    official vocabulary."""
    config = BASE[family]
    match size:
        case "small":
            config, rows, length = config.model_copy(update=SMALL), 16, 128
        case "base":
            rows, length = 4, 512
        case _:
            assert_never(size)
    if layers is not None:
        config = config.model_copy(update={"layers": layers})
    return Setting(family, config, rows, length, lengths, rounds, threads)


def bench_step(setting: Setting, progress: Callable[[str], None] = print) -> Comparison:
    """Measure. Raises BenchError where transformers is not installed."""
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    pair = _pair(setting)
    gap = _loss_gap(pair)
    sides = {"ours": _stepper(pair.ours, pair.our_loss), "peer": _stepper(pair.theirs, pair.their_loss)}
    if not isinstance(pair, PermutedPair):
        sides["peer_masked"] = _stepper(pair.theirs, pair.their_masked_loss)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(setting.rounds + 1):
        for name, step in sides.items():
            start = time.process_time()
            step()
            if i:
                seconds[name].append(time.process_time() - start)
        progress(f"round {i} of {setting.rounds}" if i else "warmed up")
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    return Comparison(
        setting,
        pair.batch.tokens.numel(),
        medians["ours"],
        medians["peer"],
        medians.get("peer_masked"),
        gap,
        pair.note,
    )


def render(result: Comparison) -> str:
    """A few lines for people."""
    s, c = result.setting, result.setting.config
    lines = [
        f"{s.family}: {c.layers} layers x {c.hidden}, vocabulary {c.vocab:,}, {s.rows} rows of {s.lengths} lengths up "
        f"to {s.length}, {result.tokens:,} tokens, {s.threads} thread(s), fp32, dropout {c.dropout} and "
        f"{c.attention_dropout} on attention",
        f"difference of the two losses before training, dropout off: {result.loss_gap:.1e}",
    ]
    sides: list[tuple[str, float | None]] = [
        ("maskfleet", result.ours),
        ("transformers", result.peer),
        ("transformers, head on masked positions only", result.peer_masked),
    ]
    for name, seconds in sides:
        if seconds is not None:
            ratio = f"{seconds / result.ours:.2f} x"
            lines.append(f"{name:<44}{seconds:>8.3f} CPU s {result.tokens / seconds:>9,.0f} tokens/s   {ratio:>8}")
    return "\n".join(lines + ([result.note] if result.note else []))


def _pair(setting: Setting) -> Pair:
    config, family = setting.config, setting.family
    lengths = row_lengths(setting.lengths, setting.rows, setting.length)
    batch = make_batch(lengths, config.vocabulary_size, spans=family == "spanbert")
    match family:
        case "bert" | "albert":
            return PairsPair(config, batch)
        case "roberta" | "deberta" | "deberta_v2":
            return MaskedPair(config, batch)
        case "spanbert":
            return MaskedPair(config, batch, span_boundary=True)
        case "electra":
            assert isinstance(config, ElectraConfig)
            return ReplacedPair(config, batch)
        case "xlnet":
            assert isinstance(config, XlnetConfig)
            return PermutedPair(config, batch)
        case _:
            assert_never(family)


def _stepper(model: nn.Module, loss: Callable[[], Tensor | None]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        value = loss()
        assert value is not None
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _loss_gap(pair: Pair) -> float:
    pair.ours.eval()
    pair.theirs.eval()
    with torch.no_grad():
        gap = max(abs(ours - theirs).item() for ours, theirs in pair.gaps())
    pair.ours.train()
    pair.theirs.train()
    return gap


def main(
    family: Annotated[Family, typer.Argument(help="Which family.")] = "roberta",
    size: Annotated[
        Size, typer.Option(help="4 layers of 256 at length 128, or the family's base at length 512.")
    ] = "small",
    lengths: Annotated[
        Lengths, typer.Option(help="Rows all equally long, or from an eighth of that to all of it.")
    ] = "full",
    layers: Annotated[int | None, typer.Option(min=1, help="Only so many layers of it.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each side.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each side.")] = 1,
) -> None:
    """A training step against transformers' class of the family: same weights, batch, threads and optimizer.

    Also shown: the peer with its head on masked positions only. Needs transformers (the dev extra).
    """
    chosen = setting(family, size, lengths, layers=layers, rounds=rounds, threads=threads)
    typer.echo(render(bench_step(chosen, note)))


if __name__ == "__main__":
    run(main)
