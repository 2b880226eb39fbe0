"""Recipes against each other by small runs of several seeds, each by `maskfleet init`, `train` and `evaluate`.

    python tests/bench/compare.py WORKDIR --text PATH... [--task TASK] [--row NAME...] [--tokens 1000000] [--seeds 3]

`comparisons.yaml` beside this file says what is compared: claims of the overviews, and the families. All runs of a row
read one text. Every run is an ordinary one, WORKDIR/ROW/RECIPE-SEED; started again, the program goes on. The page,
WORKDIR/COMPARISONS.md, is written anew after each row. On two quiet cores a run takes minutes, all rows a night.

Held-out loss is under each recipe's own masks, which may be harder in one than in the other. So every network that
fills masks is also measured on the rows and masks of the row's first recipe (`common`).
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
import typer
import yaml
from program import BenchError, note, run
from pydantic import BaseModel, ConfigDict

from checkpoints.listing import list_committed
from checkpoints.load import CheckpointReader
from data_service.samples.spec import StreamSpec
from data_service.stream.stream import Stream
from data_service.tokenizers.tokenizer import Kind
from encoder_core.optim.schedules import ScheduleConfig
from encoder_core.train.metrics import figures_from_sums, sum_losses
from encoder_core.train.step import Microbatch
from launcher.exit_codes import REPEAT
from launcher.runtime.rank.collate import to_batch
from launcher.runtime.recipe.identity import changed_paths, identity_fields
from launcher.runtime.recipe.load import load, with_assignments
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.timeline import recipe_after, tokens_before
from launcher.runtime.recipe.tiny import tiny
from launcher.runtime.run.history import read_history
from launcher.runtime.run.record import RECORD_FILE, Run, open_run, select_checkpoint
from launcher.runtime.run.streams import heldout_spec

ROWS = 1024  # held-out rows, at most, of the common figures
_KIND_FLAGS = {"wordpiece": ("--lowercase", "--strip-marks")}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Compared(_Part):
    """A bundled recipe, and settings of its small form. `tokens`: in place of the row's."""

    recipe: str
    settings: list[str] = []
    tokens: int | None = None


class Row(_Part):
    """A claim, where it is made, and the recipes that try it.

    Attributes:
        settings: of all the row's recipes, before their own.
        tokens: number of tokens, in full rows, that each run is trained on, in place of everybody's.
        own_tokenizers: whether each recipe has the kind of tokenizer of its family; otherwise all have WordPiece.
    """

    claim: str
    source: str
    settings: list[str] = []
    recipes: dict[str, Compared]
    tokens: int | None = None
    own_tokenizers: bool = False


class Comparisons(_Part):
    """See comparisons.yaml."""

    vocabulary: int
    heldout: float
    tokens: int
    seeds: int
    settings: list[str]
    rows: dict[str, Row]


class Found(_Part):
    """What a run is found to be. `changed`: fields of the recipe's identity that differ from the row's first."""

    tokens: int
    changed: list[str]
    figures: dict[str, float]


def main(
    workdir: Path,
    text: Annotated[list[str], typer.Option("--text", help="Files and folders of text.")],
    task: Annotated[str | None, typer.Option("--task", help="A task or suite to fine-tune on.")] = None,
    rows: Annotated[list[str] | None, typer.Option("--row", help="Only this one; repeat it.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="In place of all of the file's.")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="In place of the file's.")] = None,
) -> None:
    wanted = read_comparisons()
    root = workdir.absolute()
    for name in rows or wanted.rows:
        row = wanted.rows[name]
        note(f"{name}: {row.claim}")
        for kind in sorted({_kind(row, one) for one in row.recipes.values()}):
            prepare(text, root, wanted.vocabulary, kind, wanted.heldout)
        for seed in range(1, (seeds or wanted.seeds) + 1):
            compare(root, name, wanted, seed, tokens)
        if task is not None:
            evaluate(root, name, task)
        (root / "COMPARISONS.md").write_text(page(wanted, root), "utf-8")
    print((root / "COMPARISONS.md").read_text("utf-8"))


def read_comparisons() -> Comparisons:
    content = Path(__file__).with_name("comparisons.yaml").read_text("utf-8")
    return Comparisons.model_validate(yaml.safe_load(content))


def prepare(text: Sequence[str], root: Path, vocabulary: int, kind: Kind, heldout: float) -> None:
    """Make a tokenizer and a corpus of the text in `root`/`kind`; what is there already stays."""
    tokenizer, corpus, ready = (root / kind / name for name in ("tokenizer", "corpus", "ready"))
    if ready.exists():
        return
    size = ("--kind", kind, "--vocab-size", str(vocabulary), *_KIND_FLAGS.get(kind, ()))
    replaced = ["--replace"] if tokenizer.exists() else []  # an earlier start ended before its corpus was there
    maskfleet("tokenizer", "train", *text, *size, *replaced, "--out", str(tokenizer))
    held = ("--heldout", str(heldout), "--out", str(corpus))
    maskfleet("corpus", "build", *text, "--tokenizer", str(tokenizer), *held)
    ready.touch()


def compare(root: Path, name: str, wanted: Comparisons, seed: int, tokens: int | None) -> None:
    """Train and measure all recipes of a row with a seed."""
    row = wanted.rows[name]
    first: Run | None = None
    for label, one in row.recipes.items():
        budget = tokens or one.tokens or row.tokens or wanted.tokens
        settings = (f"seed={seed}", *_inputs(root / _kind(row, one), wanted.heldout))
        recipe = recipe_of(one, (*wanted.settings, *row.settings), budget, settings)
        place = root / name / f"{label}-{seed}"
        trained = train(recipe, place)
        first = first or trained
        kept = place.with_suffix(".json")
        if not kept.exists():
            note(f"{name}: measuring {label}, seed {seed}")
            kept.write_text(measure(trained, first).model_dump_json(indent=1), "utf-8")


def _kind(row: Row, one: Compared) -> Kind:
    return tokenizer_kind(load(one.recipe)) if row.own_tokenizers else "wordpiece"


def tokenizer_kind(recipe: Recipe) -> Kind:
    """Return the kind of tokenizer that the recipe's family was published with."""
    match recipe.model.family:
        case "roberta" | "deberta" | "modernbert" | "eurobert" | "bart":
            return "byte_bpe"
        case "albert" | "xlnet" | "deberta_v2":
            return "unigram"
        case _:
            return "wordpiece"


def _inputs(folder: Path, heldout: float) -> tuple[str, ...]:
    corpus = {"sources": {"text": {"uri": str(folder / "corpus")}}, "heldout": {"fraction": heldout}}
    return (f"corpus={json.dumps(corpus)}", f"tokenizer.uri={folder / 'tokenizer'}")


def recipe_of(one: Compared, common: Sequence[str], tokens: int, inputs: Sequence[str]) -> Recipe:
    """Return the small form of a recipe with the steps that take `tokens` tokens. Phases and schedules are scaled."""
    return at_budget(with_assignments(tiny(load(one.recipe)), (*common, *one.settings, *inputs)), tokens)


def at_budget(recipe: Recipe, tokens: int) -> Recipe:
    factor = tokens / tokens_before(recipe, recipe.total_steps)
    phases = tuple(_scaled(phase, factor) for phase in recipe.phases)
    steps = sum(phase.steps for phase in phases)
    schedule = _scaled_schedule(recipe.schedule, factor, steps)
    scaled = recipe.model_copy(update={"phases": phases, "schedule": schedule})
    every = {"steps": steps}
    return with_assignments(scaled, (f"evaluation.every={every}", f"checkpoint.every={every}"))


def _scaled(phase: RecipePhase, factor: float) -> RecipePhase:
    changes: dict[str, object] = {"steps": max(1, round(phase.steps * factor))}
    if phase.mixture is not None:
        changes["mixture"] = phase.mixture.model_copy(update={"steps": None})
    return phase.model_copy(update=changes)


def _scaled_schedule(schedule: ScheduleConfig, factor: float, steps: int) -> ScheduleConfig:
    warmup = int(schedule.warmup * factor)
    decay = schedule.decay_steps and max(1, min(steps - warmup, int(schedule.decay_steps * factor)))
    return schedule.model_copy(update={"warmup": warmup, "decay_steps": decay})


def train(recipe: Recipe, place: Path) -> Run:
    """Return the run at `place`, created if it is not there, and trained to its end."""
    if not (place / RECORD_FILE).exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        file = place.with_suffix(".yaml")
        file.write_text(recipe.to_yaml(), "utf-8")
        maskfleet("init", str(file), str(place))
    trained = open_run(str(place))
    marks = list_committed(trained.store)
    if not marks or marks[0].step < trained.recipe.total_steps:
        maskfleet("train", str(place))
    return trained


def measure(trained: Run, first: Run) -> Found:
    """Return the figures of a run's last checkpoint: on its own held-out rows, and on those of `first`."""
    own = read_history(trained.store).evaluations[-1]
    figures = {key: float(value) for key, value in own.items() if key.endswith(("_loss", "_accuracy"))}
    mlm = first.recipe.objective.mlm
    if mlm is not None and first.record.inputs.tokenizer == trained.record.inputs.tokenizer:
        spec = heldout_spec(first, first.tokenizer())
        rows = spec.model_copy(update={"masking": RecipeObjective(mlm=mlm).masking})
        figures |= {f"common {key}": value for key, value in fill_masks(trained, rows).items()}
    fields = [{**identity_fields(one.recipe), "seed": None} for one in (first, trained)]
    return Found(
        tokens=tokens_before(trained.recipe, trained.recipe.total_steps),
        changed=sorted(changed_paths(*fields)),
        figures=figures,
    )


def fill_masks(trained: Run, spec: StreamSpec) -> Mapping[str, float]:
    """Return `mlm_loss` in nats per masked token, and `mlm_accuracy`, of the run's encoder and language-model head on
    the rows of `spec`; empty if it has no such head (a discriminator)."""
    recipe, tokenizer = recipe_after(trained.recipe, trained.recipe.total_steps), trained.tokenizer()
    mlm = recipe.objective.mlm
    if mlm is None or recipe.objective.rtd is not None or recipe.model.max_length < spec.length:
        return {}
    config = recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    module = objective_module(config, RecipeObjective(mlm=mlm)).eval()
    with CheckpointReader(trained.store, select_checkpoint(trained, None)) as reader, torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(reader.read_full(name))
    stream, size = Stream(spec), 32
    count = min(ROWS, stream.samples_per_epoch)
    microbatches = (
        Microbatch(index, to_batch(stream.read(0, start, min(start + size, count)), torch.device("cpu")))
        for index, start in enumerate(range(0, count, size))
    )
    with torch.no_grad():
        found = figures_from_sums(sum_losses(module, module, microbatches, 0))
    return {name: found[name] for name in ("mlm_loss", "mlm_accuracy")}


def evaluate(root: Path, name: str, task: str) -> None:
    """Fine-tune all runs of a row, one seed each, and add the figures to theirs."""
    places = {str(file.with_suffix("")): file for file in sorted((root / name).glob("*-*.json"))}
    options = ("--results", str(root / "results"), "--seeds", "1", "--json")
    for line in maskfleet("evaluate", *places, task, *options).splitlines():
        record = json.loads(line)
        file = places[record["checkpoint"]]
        found = Found.model_validate_json(file.read_bytes())
        figures = found.figures | {f"{record['task']} {record['metric']}": record["median"]}
        file.write_text(found.model_copy(update={"figures": figures}).model_dump_json(indent=1), "utf-8")


def maskfleet(*arguments: str) -> str:
    """Run the command and return its standard output. If it was interrupted, so is this program."""
    command = [sys.executable, "-P", "-m", "maskfleet", *arguments]
    ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if ended.returncode == REPEAT:
        sys.exit(REPEAT)
    if ended.returncode:
        raise BenchError(
            f"maskfleet {' '.join(arguments[:2])} ended with {ended.returncode}", remedy="see what it said"
        )
    return ended.stdout


def page(wanted: Comparisons, root: Path) -> str:
    """Return what was found, in Markdown; rows that were not run are named."""
    lines = ["# What small runs say", ""]
    for name, row in wanted.rows.items():
        found = {label: _by_seed(root / name, label) for label in row.recipes}
        lines += [f"## {row.claim}", "", f"{row.source}.", ""]
        lines += [*(_table(found) if any(found.values()) else ["Not run."]), ""]
    return "\n".join(lines) + "\n"


def _by_seed(folder: Path, label: str) -> dict[str, Found]:
    files = {file.stem.rpartition("-"): file for file in sorted(folder.glob(f"{label}-*.json"))}
    return {
        parts[2]: Found.model_validate_json(file.read_bytes()) for parts, file in files.items() if parts[0] == label
    }


def _table(found: Mapping[str, Mapping[str, Found]]) -> list[str]:
    """Return a row for each recipe, and one for its differences from the first, seed by seed."""
    runs = [one for seeds in found.values() for one in seeds.values()]
    names = sorted({name for one in runs for name in one.figures})
    fields = sorted({field for one in runs for field in one.changed})
    lines = [f"Not equal: {', '.join(fields)}.", "", f"| recipe | runs | tokens | {' | '.join(names)} |"]
    lines.append("|---" * (len(names) + 3) + "|")
    first = next(iter(found.values()))
    for label, seeds in found.items():
        tokens = f"{mean(one.tokens for one in seeds.values()):,.0f}" if seeds else "-"
        cells = [[one.figures[name] for one in seeds.values() if name in one.figures] for name in names]
        lines.append(f"| {label} | {len(seeds)} | {tokens} | {' | '.join(map(_spelt, cells))} |")
        if seeds is not first:
            less = [_differences(seeds, first, name) for name in names]
            lines.append(f"| {label} less the first | | | {' | '.join(map(_spelt, less))} |")
    return lines


def _differences(seeds: Mapping[str, Found], first: Mapping[str, Found], name: str) -> list[float]:
    both = [(seeds[seed].figures, first[seed].figures) for seed in seeds if seed in first]
    return [own[name] - other[name] for own, other in both if name in own and name in other]


def _spelt(values: Sequence[float]) -> str:
    if not values:
        return "-"
    span = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else ""
    return f"{mean(values):.4g}{span}"


if __name__ == "__main__":
    run(main)
