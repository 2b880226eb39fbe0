"""Where the best learning rate lies at each width, with muP and without: python tests/bench/mup.py TEXT... --out DIR.

A small RoBERTa of two layers is trained at several widths and rates, by AdamW and by Muon: once by a recipe of which
only the widths are changed, once with `model.mup`, whose base is the narrowest width. All trials of an optimizer read
the same batches. A trial ends with the loss on the same held-out rows. Weights, groups of parameters and rates are a
run's (`launcher/runtime/rank/build.py`); the loop is one of this file, in one process: a trial takes seconds.

Widths from `--bracket-from` on are dear: there only the best rate and its neighbours are tried, and the rate that was
best at the narrowest width. "Best" is the vertex of the parabola through the best rate and its neighbours, over
logarithms.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import typer
from compare import prepare
from program import note, run

from data_service.samples.samples import Samples, slice_rows
from data_service.stream.stream import Stream
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.batch import Batch
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.optim.updates import set_update
from launcher.app.cli.options import InputsArgument
from launcher.runtime.rank.build import build_model, build_optimizer
from launcher.runtime.rank.collate import to_batch
from launcher.runtime.recipe.load import load, with_assignments
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.timeline import learning_rate
from launcher.runtime.recipe.tiny import tiny
from launcher.runtime.run.create import create_run
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import heldout_spec, stream_spec

Optimizer = Literal["adamw", "muon"]
_HEAD, _LENGTH, _HELDOUT, _EVALUATED, _SEED = 32, 32, 0.05, 256, 1
_CPU = torch.device("cpu")


class Trial(NamedTuple):
    """A model of this width, trained by this optimizer at the rate 2 ** `power`."""

    optimizer: Optimizer
    scaled: bool
    width: int
    power: int

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{'mup' if self.scaled else 'plain'}-{self.width}-{-self.power}"


@dataclass(frozen=True)
class Grid:
    """What is tried.

    Attributes:
        widths: from the narrowest, the base of muP, to the widest.
        powers: rates by their exponents of 2, the lowest first.
        bracket_from: width from which on not all rates are tried.
    """

    widths: tuple[int, ...]
    powers: tuple[int, ...]
    bracket_from: int


Losses = dict[int, float]
"""Held-out loss in nats by the exponent of the rate."""


def search(grid: Grid, measure: Callable[[int, int], float]) -> dict[int, Losses]:
    """Return the losses of each width. `measure` is asked for width and exponent."""
    found: dict[int, Losses] = {}
    for width in grid.widths:
        if width < grid.bracket_from or not found:
            found[width] = {power: measure(width, power) for power in grid.powers}
            continue
        first, before = (best(its) for its in (found[grid.widths[0]], list(found.values())[-1]))
        own = found[width] = {first: measure(width, first)}
        own |= {power: measure(width, power) for power in (before - 1, before, before + 1)}
        while missing := [power for power in neighbours(own) if power not in own]:
            own[missing[0]] = measure(width, missing[0])
    return found


def best(losses: Losses) -> int:
    return min(losses, key=losses.__getitem__)


def neighbours(losses: Losses) -> tuple[int, int]:
    return best(losses) - 1, best(losses) + 1


def place(losses: Losses) -> float:
    """The exponent of the best rate, between those that were tried; that of the best one if it is the last or first."""
    middle = best(losses)
    low, high = (losses.get(power, math.inf) for power in neighbours(losses))
    if not (math.isfinite(low) and math.isfinite(high)):
        return float(middle)
    return middle + 0.5 * (low - high) / (low + high - 2 * losses[middle])


@dataclass(frozen=True)
class Data:
    """Batches of the training steps, held-out batches, and the tokenizer."""

    steps: tuple[Batch, ...]
    heldout: tuple[Batch, ...]
    tokenizer: Tokenizer


def recipe_of(trial: Trial, root: str, base: int, steps: int, rows: int) -> Recipe:
    """A trial as a recipe."""
    rate = {"lr": 2.0**trial.power, "weight_decay": 0.01, "betas": [0.9, 0.98]}
    settings: dict[str, object] = {
        "seed": _SEED,
        "corpus": {
            "sources": {"text": {"uri": f"{root}/byte_bpe/corpus"}},
            "heldout": {"fraction": _HELDOUT},
        },
        "tokenizer.uri": f"{root}/byte_bpe/tokenizer",
        "model.hidden": trial.width,
        "model.heads": trial.width // _HEAD,
        "model.feed_forward": 2 * trial.width,
        "phases": [{"steps": steps, "length": _LENGTH, "batch": {"sequences": rows}}],
        "microbatch": rows,
        "optimizer": {trial.optimizer: rate},
        "schedule": {"warmup": steps // 10, "decay": "linear"},
        "evaluation": {"every": {"steps": steps}, "samples": _EVALUATED},
        "model.mup": {"hidden": base} if trial.scaled else None,
    }
    small = tiny(load("roberta-base"))
    return with_assignments(small, tuple(f"{key}={json.dumps(value)}" for key, value in settings.items()))


def read(made: Run, steps: int, rows: int) -> Data:
    """The batches of every trial."""
    tokenizer = made.tokenizer()
    stream, heldout = (Stream(spec) for spec in (stream_spec(made, tokenizer, 0), heldout_spec(made, tokenizer)))
    samples = stream.read(0, 0, steps * rows)
    return Data(
        tuple(batch_of(slice_rows(samples, step * rows, (step + 1) * rows), step * rows) for step in range(steps)),
        tuple(batch_of(heldout.read(0, at, at + 64), at) for at in range(0, _EVALUATED, 64)),
        tokenizer,
    )


def batch_of(samples: Samples, first: int) -> Batch:
    """`first`: number of the first row, which its draws belong to."""
    return to_batch(samples, _CPU, first)


def loss_of(recipe: Recipe, data: Data) -> float:
    """Train by the recipe; the held-out loss in nats, or infinity if the loss was not finite on the way."""
    model = build_model(recipe, data.tokenizer)
    return heldout_loss(model, data.heldout) if train(recipe, model, data.steps) else math.inf


def train(recipe: Recipe, model: ObjectiveModule, steps: Sequence[Batch]) -> bool:
    """Train `model` by the recipe; whether the loss stayed finite."""
    optimizer, clip = build_optimizer(recipe, model), recipe.optimizer.settings.clip
    model.train()
    for step, batch in enumerate(steps):
        (term,) = model(batch).terms
        loss = term.loss_sum / term.targets
        if not loss.isfinite():
            return False
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        set_update(optimizer, lr=learning_rate(recipe, step), count=step + 1)
        optimizer.step()
        optimizer.zero_grad()
    return True


def heldout_loss(model: ObjectiveModule, batches: Sequence[Batch]) -> float:
    """The mean loss in nats over all targets."""
    model.eval()
    with torch.no_grad():
        terms = [model(batch).terms[0] for batch in batches]
    mean: float = float(sum(term.loss_sum for term in terms)) / sum(term.targets for term in terms)
    return mean


def render(optimizer: str, found: dict[bool, dict[int, Losses]]) -> str:
    """Tables in Markdown."""
    powers = sorted({power for its in found.values() for losses in its.values() for power in losses})
    lines = [
        f"| {optimizer} | width | {' | '.join(f'2^{power}' for power in powers)} | best rate |",
        f"|---|--:|{'--:|' * (len(powers) + 1)}",
    ]
    for scaled, its in found.items():
        for width, losses in its.items():
            cells = [f"{losses[power]:.3f}" if power in losses else "" for power in powers]
            if math.isfinite(losses[best(losses)]):
                cells[powers.index(best(losses))] = f"**{losses[best(losses)]:.3f}**"
            lines.append(
                f"| {'muP' if scaled else 'without'} | {width} | {' | '.join(cells)} | {2.0 ** place(losses):.2e} |"
            )
    return "\n".join([*lines, "", *(_said(scaled, its) for scaled, its in found.items())])


def _said(scaled: bool, found: dict[int, Losses]) -> str:
    (narrow, first), *_, (wide, last) = found.items()
    moved = 2.0 ** (place(last) - place(first))
    spread = statistics.pstdev(place(losses) for losses in found.values())
    regret = last.get(best(first), math.nan) - last[best(last)]
    return (
        f"{'With' if scaled else 'Without'} muP the best rate at width {wide} is {moved:.2f} times that at {narrow} "
        f"(spread over widths {spread:.2f} powers of 2); at {wide}, the best rate of {narrow} costs {regret:.3f} nats."
    )


def bench(
    optimizer: Optimizer, grid: Grid, root: Path, *, steps: int, rows: int, progress: Callable[[str], None]
) -> dict[bool, dict[int, Losses]]:
    """All trials of an optimizer, without muP and with it. What `root` holds of an earlier bench is read back."""
    base = grid.widths[0]
    first = recipe_of(Trial(optimizer, False, base, grid.powers[0]), str(root), base, steps, rows)
    made = create_run(first, f"{root}/runs/{datetime.now(UTC):%H%M%S%f}", datetime.now(UTC))
    data = read(made, steps, rows)

    def measure(scaled: bool, width: int, power: int) -> float:
        trial = Trial(optimizer, scaled and width > base, width, power)  # at the base both are the same
        kept = root / "results" / f"{trial.name}-{steps}-{rows}.json"
        if not kept.exists():
            loss = loss_of(recipe_of(trial, str(root), base, steps, rows), data)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(loss))
            progress(f"{trial.name}: {loss:.4f}")
        return _number(kept)

    return {
        scaled: search(grid, lambda width, power, scaled=scaled: measure(scaled, width, power))  # type: ignore[misc]
        for scaled in (False, True)
    }


def _number(kept: Path) -> float:
    loss: float = json.loads(kept.read_text())
    return loss


def main(
    texts: InputsArgument,
    out: Annotated[Path, typer.Option(help="Folder for corpus and results; an interrupted bench goes on.")],
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    width: Annotated[list[int] | None, typer.Option(help="A width; again for more. Default: 64 to 512.")] = None,
    lowest: Annotated[int, typer.Option(help="Exponent of 2 of the lowest rate.")] = -11,
    highest: Annotated[int, typer.Option(help="Exponent of 2 of the highest rate.")] = -5,
    bracket_from: Annotated[int, typer.Option(help="Width from which on not all rates are tried.")] = 512,
    steps: Annotated[int, typer.Option(min=20, help="Of a trial.")] = 200,
    rows: Annotated[int, typer.Option(min=1, help="Of a step, of 32 tokens.")] = 16,
    vocabulary: Annotated[int, typer.Option(min=300, help="Ids of the tokenizer.")] = 1024,
) -> None:
    """Held-out loss by learning rate and width, with muP and without."""
    chosen: Optimizer = "muon" if optimizer == "muon" else "adamw"
    root = out.absolute()
    prepare(texts, root, vocabulary, "byte_bpe", _HELDOUT)
    grid = Grid(tuple(width or (64, 128, 256, 512)), tuple(range(lowest, highest + 1)), bracket_from)
    typer.echo(render(chosen, bench(chosen, grid, root, steps=steps, rows=rows, progress=note)))


if __name__ == "__main__":
    run(main)
