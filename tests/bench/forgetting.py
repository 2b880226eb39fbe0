"""What a model forgets while it is continued: python tests/bench/forgetting.py --old TEXT --new TEXT --out DIR.

A small RoBERTa of two layers learns the old text. Then it is continued on the new one, at several rates, with several
shares of old text mixed in, and from several seeds. A trial ends with the losses on the same held-out rows of both
texts, as `evaluation.before` states them. Weights, optimizer and rows are a run's; the loop is that of `mup.py`.
"""

import json
import statistics
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from compare import maskfleet
from mup import batch_of, heldout_loss, train
from program import note, run

from data_service.stream.stream import Stream
from encoder_core.batch import Batch
from encoder_core.objectives.modules.losses import ObjectiveModule
from launcher.runtime.rank.build import build_model
from launcher.runtime.recipe.load import load, with_assignments
from launcher.runtime.recipe.tiny import tiny
from launcher.runtime.run.create import create_run
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import before_text_specs, heldout_spec, stream_spec

RATES, SHARES, SEEDS = (1e-4, 3e-4, 1e-3), (0.0, 0.05, 0.25), (1, 2, 3)
_HIDDEN, _LENGTH, _ROWS, _EVALUATED, _HELDOUT, _VOCABULARY = 64, 64, 16, 256, 0.1, 2048


@dataclass(frozen=True)
class Losses:
    """Held-out losses in nats, on the new text and on the old."""

    new: float
    old: float


def prepare(root: Path, old: Path, new: Path) -> None:
    """Corpora of both texts with the old one's tokenizer; what is there already stays."""
    if (root / "ready").exists():
        return
    tokenizer = str(root / "tokenizer")
    size = ("--kind", "byte_bpe", "--vocab-size", str(_VOCABULARY), "--replace")
    maskfleet("tokenizer", "train", str(old), *size, "--out", tokenizer)
    for name, text in (("old", old), ("new", new)):
        held = ("--heldout", str(_HELDOUT), "--out", str(root / name))
        maskfleet("corpus", "build", str(text), "--tokenizer", tokenizer, *held)
    (root / "ready").touch()


def make_run(root: Path, *, shares: dict[str, float], rate: float, steps: int, seed: int) -> Run:
    """A run of the small model on texts with these shares of the rows."""
    weighed = {name: share for name, share in shares.items() if share}
    settings: dict[str, object] = {
        "seed": seed,
        "corpus": {
            "sources": {
                name: {"uri": f"{root}/{name}", "weight": share if len(weighed) > 1 else "auto"}
                for name, share in weighed.items()
            },
            "heldout": {"fraction": _HELDOUT},
        },
        "tokenizer.uri": f"{root}/tokenizer",
        "model.hidden": _HIDDEN,
        "model.heads": 2,
        "model.feed_forward": 4 * _HIDDEN,
        "model.max_length": _LENGTH,
        "phases": [{"steps": steps, "length": _LENGTH, "batch": {"sequences": _ROWS}}],
        "microbatch": _ROWS,
        "optimizer": {"adamw": {"lr": rate, "betas": [0.9, 0.98], "clip": 1.0, "bias_correction": True}},
        "schedule": {"warmup": steps // 10, "decay": "linear"},
        "evaluation": {"every": {"steps": steps}, "samples": _EVALUATED, "before": {"uri": f"{root}/old"}},
    }
    recipe = with_assignments(tiny(load("roberta-base")), tuple(f"{k}={json.dumps(v)}" for k, v in settings.items()))
    return create_run(recipe, f"{root}/runs/{datetime.now(UTC):%d%H%M%S%f}", datetime.now(UTC))


def trained(made: Run, start: ObjectiveModule | None) -> ObjectiveModule:
    """The run's model at its end, from the weights of `start`."""
    model = build_model(made.recipe, made.tokenizer())
    if start is not None:
        model.load_state_dict(start.state_dict())
    train(made.recipe, model, rows_of(made))
    return model


def rows_of(made: Run) -> list[Batch]:
    """The batches of all steps; the text is read again from its beginning, with other masks, where it ends."""
    stream = Stream(stream_spec(made, made.tokenizer(), 0))
    steps, each = made.recipe.total_steps, stream.samples_per_epoch // _ROWS
    return [
        batch_of(stream.read(step // each, at * _ROWS, (at + 1) * _ROWS), at * _ROWS)
        for step in range(steps)
        for at in [step % each]
    ]


def measured(plain: Run, model: ObjectiveModule) -> Losses:
    """`plain`: a run on the new text alone. Held-out rows of a run with old text in it would be of both."""
    tokenizer = plain.tokenizer()
    specs = heldout_spec(plain, tokenizer), before_text_specs(plain, tokenizer)[0]
    return Losses(*(heldout_loss(model, _heldout(Stream(spec))) for spec in specs))


def _heldout(stream: Stream) -> list[Batch]:
    count = min(_EVALUATED, stream.samples_per_epoch)
    return [batch_of(stream.read(0, at, min(at + 64, count)), at) for at in range(0, count, 64)]


def bench(root: Path, *, learning: int, steps: int, seeds: tuple[int, ...]) -> dict[str, list[Losses]]:
    """The losses of each trial's seeds, by its name; those before it is continued are called `before`.

    What `root` holds of an earlier bench is read back.
    """
    found: dict[str, list[Losses]] = {}
    for seed in seeds:
        first = make_run(root, shares={"old": 1.0}, rate=2e-3, steps=learning, seed=seed)
        start = _kept_weights(root / f"start-{seed}-{learning}.pt", first)
        plain = make_run(root, shares={"new": 1.0}, rate=RATES[0], steps=steps, seed=seed)
        trials = {f"{rate:g}-{share:g}": (rate, share) for rate in RATES for share in SHARES}
        for name in ("before", *trials):
            kept = root / f"losses-{name}-{seed}-{learning}-{steps}.json"
            if not kept.exists():
                model = start if name == "before" else _continued(root, start, *trials[name], steps, seed)
                kept.write_text(json.dumps(asdict(measured(plain, model))))
                note(f"seed {seed}, {name}: {kept.read_text()}")
            found.setdefault(name, []).append(Losses(**json.loads(kept.read_text())))
    return found


def _continued(root: Path, start: ObjectiveModule, rate: float, share: float, steps: int, seed: int) -> ObjectiveModule:
    shares = {"new": 1 - share, "old": share}
    return trained(make_run(root, shares=shares, rate=rate, steps=steps, seed=seed), start)


def _kept_weights(path: Path, first: Run) -> ObjectiveModule:
    """The model that learned the old text, which is kept at `path`."""
    if path.exists():
        model = build_model(first.recipe, first.tokenizer())
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    model = trained(first, None)
    torch.save(model.state_dict(), path)
    return model


def render(found: dict[str, list[Losses]]) -> str:
    """A table in Markdown: means over the seeds, and how far they lie apart."""
    lines = [
        "| rate | old text mixed in | new text, nats | old text, nats | forgotten |",
        "|--:|--:|--:|--:|--:|",
    ]
    before = found["before"]
    lines.append(f"| before | | {_spelt([one.new for one in before])} | {_spelt([one.old for one in before])} | |")
    for rate in RATES:
        for share in SHARES:
            its = found[f"{rate:g}-{share:g}"]
            rises = [after.old - first.old for after, first in zip(its, before, strict=True)]
            cells = (_spelt([one.new for one in its]), _spelt([one.old for one in its]), _spelt(rises, "+"))
            lines.append(f"| {rate:g} | {share:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spelt(values: list[float], sign: str = "") -> str:
    half = (max(values) - min(values)) / 2
    return f"{statistics.mean(values):{sign}.3f} ± {half:.3f}"


def main(
    old: Annotated[Path, typer.Option(help="Text that the model knows.")],
    new: Annotated[Path, typer.Option(help="Text on which it is continued.")],
    out: Annotated[Path, typer.Option(help="Folder for corpora and runs; made text and models stay.")],
    learning: Annotated[int, typer.Option(min=10, help="Steps on the old text.")] = 1500,
    steps: Annotated[int, typer.Option(min=10, help="Steps of a trial.")] = 200,
    seeds: Annotated[int, typer.Option(min=1)] = len(SEEDS),
) -> None:
    """Losses on new and old text by rate and by share of old text."""
    root = out.absolute()
    root.mkdir(parents=True, exist_ok=True)
    prepare(root, old, new)
    typer.echo(render(bench(root, learning=learning, steps=steps, seeds=SEEDS[:seeds])))


if __name__ == "__main__":
    run(main)
