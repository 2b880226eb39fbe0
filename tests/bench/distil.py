"""What a teacher is worth on one text: python tests/bench/distil.py TEXT... --out DIR.

A teacher is trained (the small form of bert-base, deeper). Then the same small student, of `distilbert-base`, is
trained for equally many tokens in four ways: by itself; by itself from the teacher's layers (taught with a weight of
1e-9); taught from fresh weights; taught from the teacher's layers, which is DistilBERT. Masked-token loss is measured
on the same held-out rows. Each seed has order, masks and fresh weights of its own.
"""

import json
import multiprocessing
import shutil
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from compare import prepare
from program import note, run
from train_alone import train_alone

from launcher.app.cli.options import InputsArgument
from launcher.observe.inspect.baselines import baselines
from launcher.runtime.recipe.load import load, reload
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.tiny import tiny
from launcher.runtime.run.create import create_run

WAYS = ("alone", "alone, from layers", "taught", "taught, from layers")
_TEACHER_LAYERS, _HELDOUT, _EVALUATED = 4, 0.05, 1024


@dataclass(frozen=True)
class Measured:
    """One way and one seed. `loss`, `unigram`: nats on held-out masked tokens, the latter by frequency alone."""

    way: str
    seed: int
    tokens: int
    cpu_seconds: float
    loss: float
    accuracy: float
    unigram: float


@dataclass(frozen=True)
class Job:
    """Everything a process needs."""

    way: str
    seed: int
    steps: int
    root: str


def measure(job: Job) -> Measured:
    """Train and evaluate; or what was found before."""
    name = f"{job.way.replace(', ', '-').replace(' ', '-')}-{job.seed}-{job.steps}"
    kept = Path(job.root, "results", f"{name}.json")
    if kept.exists():
        return Measured(**json.loads(kept.read_text()))
    uri = Path(job.root, "runs", name)
    shutil.rmtree(uri, ignore_errors=True)  # of a bench that was interrupted
    made = create_run(_recipe(job), str(uri), datetime.now(UTC))
    spent = train_alone(made)
    figures = spent.figures
    measured = Measured(
        way=job.way,
        seed=job.seed,
        tokens=spent.tokens,
        cpu_seconds=spent.cpu_seconds,
        loss=figures["mlm_loss"],
        accuracy=figures["mlm_accuracy"],
        unigram=baselines(made).unigram,
    )
    if job.way == "teacher":
        uri.rename(_teacher(job.root))
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(asdict(measured), indent=1))
    return measured


def _teacher(root: str) -> Path:
    return Path(root, "runs", "teacher")


def _recipe(job: Job) -> Recipe:
    """The teacher masks anew in each reading and packs whole rows, as the students do."""
    student = tiny(load("distilbert-base"))
    settings: dict[str, object] = {
        "corpus": {
            "sources": {"text": {"uri": f"{job.root}/wordpiece/corpus"}},
            "heldout": {"fraction": _HELDOUT},
        },
        "tokenizer.uri": f"{job.root}/wordpiece/tokenizer",
        "seed": job.seed,
        "phases.0.steps": job.steps,
        "schedule.warmup": job.steps // 20,
        "evaluation": {"every": {"steps": job.steps}, "samples": _EVALUATED},
        "checkpoint.every": {"steps": job.steps},
        "logging": {"flush_seconds": 1000.0, "tensorboard": False},
    }
    teacher = student.model.model_copy(update={"layers": _TEACHER_LAYERS, "token_types": 2})
    if job.way == "teacher":
        settings |= {"start": "scratch", "model": teacher.model_dump(mode="json")}
    else:
        its = {"uri": str(_teacher(job.root)), "model": teacher.model_dump(mode="json")}
        settings |= {"model.layers": _TEACHER_LAYERS // 2, "objective.distil.teachers": [its]}
        settings["start"] = "teacher" if job.way.endswith("layers") else "scratch"
    if not job.way.startswith("taught"):
        settings |= {"objective.distil.weight": 1e-9, "objective.cosine": None}
    if job.way in ("teacher", "alone"):
        settings = {k: v for k, v in settings.items() if not k.startswith("objective.")}
        settings |= {"objective.distil": None, "objective.cosine": None}
    return reload(student, tuple(f"{key}={json.dumps(value)}" for key, value in settings.items()))


def render(teacher: Measured, students: Sequence[Measured]) -> str:
    """A table in Markdown: means over the seeds, and in brackets the smallest and the largest."""
    lines = [
        f"The teacher: {teacher.loss:.3f} nats, {teacher.tokens:,} tokens; by frequency alone {teacher.unigram:.3f}.",
        "",
        "| student | tokens | CPU s | held-out loss, nats | accuracy |",
        "|---|---|---|---|---|",
    ]
    for way in dict.fromkeys(item.way for item in students):
        own = [item for item in students if item.way == way]
        losses, right = [item.loss for item in own], [item.accuracy for item in own]
        lines.append(
            f"| {way} | {statistics.mean(item.tokens for item in own):,.0f} "
            f"| {statistics.mean(item.cpu_seconds for item in own):.0f} "
            f"| {statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f}) "
            f"| {statistics.mean(right):.1%} ({min(right):.1%} to {max(right):.1%}) |"
        )
    return "\n".join(lines)


def main(
    texts: InputsArgument,
    out: Annotated[
        Path, typer.Option(help="Folder for corpora, runs and results; an interrupted bench goes on.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Students of each way.")] = 3,
    steps: Annotated[int, typer.Option(min=20, help="Of a student, 1,024 tokens each.")] = 800,
    teacher_steps: Annotated[int, typer.Option(min=20, help="Of the teacher.")] = 4000,
    way: Annotated[
        list[str] | None, typer.Option("--way", help="One of the four ways; again for more. Default: all.")
    ] = None,
    vocabulary: Annotated[int, typer.Option(min=500, help="Ids of the tokenizer.")] = 2048,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, of one thread each.")] = 1,
) -> None:
    """A student taught, and the same student by itself, at equal tokens."""
    root = out.absolute()
    prepare(texts, root, vocabulary, "wordpiece", _HELDOUT)
    wanted = [name for name in WAYS if not way or name in way]
    jobs = [Job(name, seed, steps, str(root)) for seed in range(1, seeds + 1) for name in wanted]
    context = multiprocessing.get_context("spawn")
    students = []
    with ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool:
        teacher = pool.submit(measure, Job("teacher", 100, teacher_steps, str(root))).result()
        note(f"the teacher: {teacher.loss:.3f} nats, {teacher.cpu_seconds:.0f} CPU s")
        for measured in pool.map(measure, jobs):
            note(
                f"{measured.way}, seed {measured.seed}: {measured.loss:.3f}, {measured.cpu_seconds:.0f} CPU s"
            )
            students.append(measured)
    typer.echo(render(teacher, students))


if __name__ == "__main__":
    run(main)
