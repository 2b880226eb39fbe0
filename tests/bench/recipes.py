"""The small forms of recipes on one text, at equal tokens and at equal CPU time: python tests/bench/recipes.py.

Each recipe is shrunk (`--tiny`) and trained by one rank as any run is, with its whole schedule: once to a number of
tokens, once for a number of CPU seconds. Measured are the held-out figures, and a linear probe over all layers against
the same network untrained. Seeds give the spread. Losses of different vocabularies cannot be compared
as they are, so each is shown with its own unigram cross-entropy, the loss of guessing by frequency.
"""

import json
import multiprocessing
import shutil
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from program import note, run
from train_alone import train_alone

from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.stream.stream import Stream
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.tokenizer import Kind
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
from launcher.after.diagnose.measures import linear_probe
from launcher.after.diagnose.own_data import probe_splits
from launcher.after.diagnose.states import open_checkpoint, untrained
from launcher.app.cli.options import InputsArgument
from launcher.app.cli.texts import sample_texts
from launcher.observe.inspect.baselines import baselines
from launcher.runtime.recipe.evaluation import ProbeSettings
from launcher.runtime.recipe.load import load, reload
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import tokens_per_step
from launcher.runtime.recipe.tiny import tiny
from launcher.runtime.run.create import create_run
from launcher.runtime.run.evaluations import Figure
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import stream_spec

RECIPES = (
    "bert-base",
    "roberta-base",
    "albert-base",
    "spanbert-base",
    "xlnet-base",
    "electra-small",
    "deberta-base",
    "deberta-v2-xlarge",
    "deberta-v3-small",
    "modernbert-base",
    "eurobert-210m",
)
_SAMPLE = 20_000_000  # bytes of text to learn tokenizers from
HELDOUT = 0.05
_EVALUATED = 512  # held-out rows
_EXAMPLES = 20_000  # of the probe's task, of each split
_SAMPLED = 2048  # rows by which it is told how full they are


@dataclass(frozen=True)
class Measured:
    """One recipe and one seed, after a run of its own.

    Attributes:
        tokens, cpu_seconds: spent in training.
        figures: the held-out evaluation at the end.
        unigram: cross-entropy of the held-out targets by frequency, nats.
        trained, untrained: accuracy of the probe, over all layers.
    """

    recipe: str
    seed: int
    tokens: int
    cpu_seconds: float
    figures: dict[str, float]
    unigram: float
    trained: float
    untrained: float

    @property
    def below_unigram(self) -> float:
        """Nats by which the loss on hidden tokens is below guessing by frequency."""
        loss = self.figures.get("mlm_loss", self.figures.get("plm_loss"))
        assert loss is not None  # every objective has one of the two
        return self.unigram - loss


@dataclass(frozen=True)
class Job:
    """A recipe and a seed to train for about so many tokens. Everything a process needs."""

    recipe: str
    seed: int
    tokens: int
    root: str
    task: str
    data: str | None


def prepare(texts: Sequence[str], root: Path, vocab_size: int, names: Sequence[str]) -> None:
    """Tokenizers and corpora of every kind that the recipes need, in `root`; those already there stay."""
    for kind in sorted({tokenizer_kind(load(name)) for name in names}):
        folder = root / kind
        if (folder / "ready").exists():
            continue
        options = TokenizerOptions(lowercase=kind == "wordpiece", strip_marks=kind == "wordpiece")
        sample = sample_texts(list(texts), BuildOptions(), _SAMPLE)
        save_tokenizer(train_tokenizer(kind, sample, vocab_size, options), f"{folder}/tokenizer")
        build_corpus(
            list(texts),
            f"{folder}/corpus",
            f"{folder}/tokenizer",
            BuildOptions(heldout_fraction=HELDOUT),
            lambda progress: None,
        )
        (folder / "ready").touch()


def bench_recipes(
    names: Sequence[str],
    seeds: int,
    tokens: int,
    cpu_seconds: float,
    root: Path,
    task: str,
    data: str | None,
    processes: int,
    progress: Callable[[str], None],
) -> tuple[list[Measured], list[Measured]]:
    """Every recipe and seed at equal tokens, then at about equal CPU time, by the rate that the first runs had.

    What `root` holds of an earlier bench is read back: an interrupted one goes on.
    """
    jobs = [Job(name, seed, tokens, str(root), task, data) for name in names for seed in range(1, seeds + 1)]
    equal_tokens = _measure_all(jobs, processes, progress)
    rates = {
        name: statistics.median(m.tokens / m.cpu_seconds for m in equal_tokens if m.recipe == name)
        for name in names
    }
    jobs = [replace(job, tokens=round(rates[job.recipe] * cpu_seconds)) for job in jobs]
    return equal_tokens, _measure_all(jobs, processes, progress)


def _measure_all(jobs: Sequence[Job], processes: int, progress: Callable[[str], None]) -> list[Measured]:
    """In the jobs' order; several at a time, each in a fresh process of one thread."""
    context = multiprocessing.get_context("spawn")
    found: list[Measured] = []
    with ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool:
        for job, measured in zip(jobs, pool.map(measure, jobs), strict=True):
            progress(
                f"{job.recipe}, seed {job.seed}, {measured.tokens:,} tokens: {measured.cpu_seconds:.0f} CPU s"
            )
            found.append(measured)
    return found


def measure(job: Job) -> Measured:
    """Train, evaluate, probe; or what was found before."""
    name = f"{job.recipe}-{job.seed}-{job.tokens}"
    kept = Path(job.root) / "results" / f"{name}.json"
    if kept.exists():
        return Measured(**json.loads(kept.read_text()))
    uri = f"{job.root}/runs/{name}"
    shutil.rmtree(uri, ignore_errors=True)  # of a bench that was interrupted
    nominal = _recipe(job, job.tokens)
    fill = _fill(create_run(nominal, f"{uri}/nominal", datetime.now(UTC)))
    run = create_run(_recipe(job, round(job.tokens / fill)), f"{uri}/run", datetime.now(UTC))
    spent = train_alone(run)
    splits = probe_splits(ProbeSettings(task=job.task, data=job.data, examples=_EXAMPLES))
    trained, fresh = (linear_probe(one.frozen, splits) for one in (open_checkpoint(run), untrained(run)))
    counts = (spent.tokens, spent.cpu_seconds, spent.figures, baselines(run).unigram)
    measured = Measured(job.recipe, job.seed, *counts, _accuracy(trained), _accuracy(fresh))
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(asdict(measured), indent=1))
    return measured


def _accuracy(figures: Sequence[Figure]) -> float:
    """Of the probe over all layers."""
    value = next(figure.value for figure in figures if figure.measure == "accuracy" and figure.layer is None)
    assert value is not None  # a share of examples, of which there are some
    return value


def _fill(run: Run) -> float:
    """Tokens of the run's rows over those of full ones, by a sample of each phase."""
    tokenizer = run.tokenizer()
    actual = full = 0.0
    for number, phase in enumerate(run.recipe.phases):
        stream = Stream(stream_spec(run, tokenizer, number))
        rows = min(_SAMPLED, stream.samples_per_epoch)
        mean = len(stream.read(0, 0, rows).tokens) / rows
        actual += phase.steps * tokens_per_step(phase) * mean / phase.length
        full += phase.steps * tokens_per_step(phase)
    return actual / full


def _recipe(job: Job, tokens: int) -> Recipe:
    """The recipe's small form for so many tokens in full rows, its phases and warmup in proportion."""
    recipe = tiny(load(job.recipe))
    factor = tokens / sum(phase.steps * tokens_per_step(phase) for phase in recipe.phases)
    phases = [
        phase.model_dump(mode="json") | {"steps": max(1, round(phase.steps * factor))}
        for phase in recipe.phases
    ]
    steps = sum(phase["steps"] for phase in phases)
    folder = Path(job.root) / tokenizer_kind(recipe)
    corpus = {"sources": {"text": {"uri": f"{folder}/corpus"}}, "heldout": {"fraction": HELDOUT}}
    settings = {
        "seed": job.seed,
        "corpus": corpus,
        "tokenizer.uri": f"{folder}/tokenizer",
        "phases": phases,
        "schedule.warmup": min(steps, round(recipe.schedule.warmup * factor)),
        "evaluation": {"every": {"steps": steps}, "samples": _EVALUATED},
        "checkpoint.every": {"steps": steps},
        "logging": {"flush_seconds": 1000.0, "tensorboard": False},
    }
    return reload(recipe, tuple(f"{key}={json.dumps(value)}" for key, value in settings.items()))


def tokenizer_kind(recipe: Recipe) -> Kind:
    """The kind of tokenizer that the family was published with."""
    match recipe.model.family:
        case "roberta" | "deberta" | "modernbert" | "eurobert" | "bart":
            return "byte_bpe"
        case "albert" | "xlnet" | "deberta_v2":
            return "unigram"
        case _:
            return "wordpiece"


def render(title: str, measured: Sequence[Measured]) -> str:
    """A table in Markdown: means over the seeds, and in brackets the range from the smallest to the largest."""
    lines = [
        f"{title}",
        "",
        "| recipe | tokens | CPU s | nats below unigram | accuracy on hidden tokens | probe | untrained | detection |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = list(dict.fromkeys(item.recipe for item in measured))
    return "\n".join(lines + [_row([item for item in measured if item.recipe == name]) for name in names])


def _row(items: Sequence[Measured]) -> str:
    hidden = [m.figures.get("mlm_accuracy", m.figures.get("plm_accuracy", 0.0)) for m in items]
    cells = [
        items[0].recipe,
        f"{statistics.mean(m.tokens for m in items):,.0f}",
        f"{statistics.mean(m.cpu_seconds for m in items):.0f}",
        _spread([m.below_unigram for m in items], "{:.2f}"),
        _spread(hidden, "{:.1%}"),
        _spread([m.trained for m in items], "{:.1%}"),
        _spread([m.untrained for m in items], "{:.1%}"),
        _detection(items),
    ]
    return f"| {' | '.join(cells)} |"


def _detection(items: Sequence[Measured]) -> str:
    """For a discriminator: its accuracy, and that of calling every token original."""
    if "rtd_accuracy" not in items[0].figures:
        return ""
    replaced = [m.figures["rtd_replaced"] for m in items]
    return (
        f"{_spread([m.figures['rtd_accuracy'] for m in items], '{:.2%}')}, "
        f"majority {1 - statistics.mean(replaced):.2%}"
    )


def _spread(values: Sequence[float], form: str) -> str:
    return (
        f"{form.format(statistics.mean(values))} ({form.format(min(values))} to {form.format(max(values))})"
    )


def main(
    texts: InputsArgument,
    task: Annotated[str, typer.Option(help="A task of classification for the probe: its name or YAML file.")],
    out: Annotated[
        Path, typer.Option(help="Folder for corpora, runs and results; an interrupted bench goes on.")
    ],
    data: Annotated[str | None, typer.Option(help="Folder or s3:// URI that holds the task's files.")] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", help="A recipe to measure; again for more. Default: one a family."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe.")] = 3,
    tokens: Annotated[int, typer.Option(min=1000, help="Training tokens, for the first table.")] = 2_000_000,
    cpu_seconds: Annotated[
        float, typer.Option(min=1, help="CPU seconds of training, for the second.")
    ] = 60.0,
    vocabulary: Annotated[int, typer.Option(min=500, help="Ids of each kind of tokenizer.")] = 4096,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, of one thread each.")] = 2,
) -> None:
    """The small forms of recipes side by side: held-out losses, and a linear probe against untrained weights."""
    names = recipe or list(RECIPES)
    prepare(texts, out, vocabulary, names)
    equal_tokens, equal_time = bench_recipes(
        names, seeds, tokens, cpu_seconds, out, task, data, processes, note
    )
    typer.echo(render(f"At about {tokens:,} tokens", equal_tokens))
    typer.echo()
    typer.echo(render(f"At about {cpu_seconds:,.0f} CPU seconds", equal_time))


if __name__ == "__main__":
    run(main)
