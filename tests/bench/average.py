"""What averages of weights are worth: python tests/bench/average.py TEXT... --out DIR.

A small RoBERTa of two layers is trained by AdamW with a warmup, a stable stretch and a decay by 1 - sqrt, with several
seeds. At the end of the stable stretch and at the end of the decay, the held-out loss is measured of the weights, of
their exponential moving averages, and of the mean of the last checkpoints, which lie evenly in the stretch. Weights,
rates and the moving average are a run's (`launcher/runtime/rank/build.py`, `encoder_core/optim/average.py`); the loop
is one of this file, in one process. All seeds read the same batches: what differs are fresh weights.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from compare import prepare
from mup import Data, heldout_loss, read
from program import note, run
from torch import Tensor

from encoder_core.objectives.losses import ObjectiveModule
from encoder_core.optim.average import WeightAverage
from encoder_core.optim.updates import WHOLE, set_update
from launcher.app.cli.options import InputsArgument
from launcher.runtime.rank.build import build_model, build_optimizer, schedule
from launcher.runtime.recipe.load import load, reload
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.tiny import tiny
from launcher.runtime.run.create import create_run

DECAYS = (0.9, 0.98, 0.99, 0.995)
_LENGTH, _HELDOUT, _EVALUATED = 32, 0.05, 256
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """How long to train: `steps` in all, of which the last `decay` decay; `rows` of a step; means are of `count`
    checkpoints."""

    steps: int
    decay: int
    rows: int
    count: int

    def checkpoints(self, end: int) -> set[int]:
        """The steps of the checkpoints whose mean is measured after `end` steps: they cover as many as the decay."""
        return {end - number * (self.decay // self.count) for number in range(self.count)}


def recipe_of(plan: Plan, root: str, seed: int) -> Recipe:
    settings: dict[str, object] = {
        "seed": seed,
        "corpus": {
            "sources": {"text": {"uri": f"{root}/byte_bpe/corpus"}},
            "heldout": {"fraction": _HELDOUT},
        },
        "tokenizer.uri": f"{root}/byte_bpe/tokenizer",
        "model.hidden": 64,
        "model.heads": 2,
        "model.feed_forward": 128,
        "phases": [{"steps": plan.steps, "length": _LENGTH, "batch": {"sequences": plan.rows}}],
        "microbatch": plan.rows,
        "optimizer": {"adamw": {"lr": 4.0e-3, "weight_decay": 0.01, "betas": [0.9, 0.98]}},
        "schedule": {"warmup": plan.steps // 20, "decay": "one_minus_sqrt", "decay_steps": plan.decay},
        "evaluation": {"every": {"steps": plan.steps}, "samples": _EVALUATED},
    }
    return reload(
        tiny(load("roberta-base")), tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
    )


def losses(recipe: Recipe, data: Data, plan: Plan) -> Iterator[tuple[str, str, float]]:
    """Train by the recipe; yield (where, which weights, held-out loss in nats)."""
    model = build_model(recipe, data.tokenizer)
    optimizer, rates, clip = build_optimizer(recipe, model), schedule(recipe), recipe.optimizer.settings.clip
    parameters = dict(model.named_parameters())
    averages = {decay: WeightAverage(decay, {WHOLE: list(parameters.values())}, {p: {} for p in parameters.values()})
                for decay in DECAYS}  # fmt: skip
    places = {plan.steps - plan.decay: "stable", plan.steps: "decayed"}
    kept: dict[int, Weights] = {}
    for step, batch in enumerate(data.steps):
        (term,) = model(batch).terms
        (term.loss_sum / term.targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)
        set_update(optimizer, lr=rates(step), count=step + 1)
        optimizer.step()
        optimizer.zero_grad()
        for average in averages.values():
            average.follow(WHOLE)
        done = step + 1
        if any(done in plan.checkpoints(end) for end in places):
            kept[done] = {name: p.detach().clone() for name, p in parameters.items()}
        if done in places:
            for which, loss in _measured(model, averages, [kept[at] for at in plan.checkpoints(done)], data):
                yield places[done], which, loss
            model.train()


def _measured(
    model: ObjectiveModule, averages: dict[float, WeightAverage], kept: list[Weights], data: Data
) -> Iterator[tuple[str, float]]:
    yield "weights", heldout_loss(model, data.heldout)
    for decay, average in averages.items():
        average.swap()
        yield f"ema {decay:g}", heldout_loss(model, data.heldout)
        average.swap()
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    _put(model, {name: torch.stack([each[name] for each in kept]).double().mean(0).float() for name in own})
    yield f"mean of {len(kept)}", heldout_loss(model, data.heldout)
    _put(model, own)


@torch.no_grad()
def _put(model: ObjectiveModule, weights: Weights) -> None:
    for name, p in model.named_parameters():
        p.copy_(weights[name])


def render(found: dict[tuple[str, str], list[float]]) -> str:
    """A table in Markdown: losses of all seeds, and the mean difference from the weights at the same place."""
    seeds = len(next(iter(found.values())))
    lines = [
        f"| at the end of | what | {' | '.join(f'seed {n + 1}' for n in range(seeds))} | less the weights |"
    ]
    lines.append(f"|---|---|{'--:|' * (seeds + 1)}")
    for (place, which), its in found.items():
        gains = [own - plain for own, plain in zip(its, found[place, "weights"], strict=True)]
        cells = " | ".join(f"{loss:.4f}" for loss in its)
        lines.append(f"| {place} | {which} | {cells} | {statistics.mean(gains):+.4f} |")
    return "\n".join(lines)


def main(
    texts: InputsArgument,
    out: Annotated[Path, typer.Option(help="Folder for corpus and runs.")],
    steps: Annotated[int, typer.Option(min=40, help="Of a training.")] = 1200,
    decay: Annotated[int, typer.Option(min=10, help="Steps in which the rate decays at the end.")] = 240,
    rows: Annotated[int, typer.Option(min=1, help="Of a step, of 32 tokens.")] = 16,
    count: Annotated[int, typer.Option(min=2, help="Checkpoints of a mean.")] = 5,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    vocabulary: Annotated[int, typer.Option(min=300, help="Ids of the tokenizer.")] = 1024,
) -> None:
    """Held-out loss of the weights, of their moving averages, and of the mean of the last checkpoints."""
    root, plan = out.absolute(), Plan(steps, decay, rows, count)
    prepare(texts, root, vocabulary, "byte_bpe", _HELDOUT)
    made = create_run(
        recipe_of(plan, str(root), 1), f"{root}/runs/{datetime.now(UTC):%H%M%S%f}", datetime.now(UTC)
    )
    data = read(made, steps, rows)
    found: dict[tuple[str, str], list[float]] = {}
    for seed in range(1, seeds + 1):
        for place, which, loss in losses(recipe_of(plan, str(root), seed), data, plan):
            found.setdefault((place, which), []).append(loss)
            note(f"seed {seed}, {place}, {which}: {loss:.4f}")
    typer.echo(render(found))


if __name__ == "__main__":
    run(main)
