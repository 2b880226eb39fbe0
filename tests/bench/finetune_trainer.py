"""A fine-tuning by `maskfleet finetune` and by transformers' Trainer:

    python tests/bench/finetune_trainer.py MODEL STS headlines
    python tests/bench/finetune_trainer.py MODEL MRPC mrpc

MODEL is a folder in the transformers format; the second is the folder of the published files: SemEval's headlines of
2014 and 2015, or Microsoft's paraphrases. Both sides train on the same pairs and are measured on the same others after
every epoch, with the same learning rate, epochs, batch, warmup, weight decay, clipping and cut of the inputs; the epoch
with the highest first metric counts. Order, dropout and the head's first weights are drawn differently, so figures are
means over seeds.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from program import note, run
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score


@dataclass(frozen=True)
class PairTask:
    """Pairs of sentences. `columns`: of the label and of both sentences. `outputs`: 1 where a score is predicted."""

    train: str
    dev: str
    header: bool
    columns: tuple[int, int, int]
    outputs: int
    described: str
    metrics: tuple[str, ...]

    def yaml(self) -> str:
        """The task for `maskfleet finetune`."""
        files = f"files: {{train: {self.train}, dev: {self.dev}}}\nformat: tsv\n"
        return f"published: as it was\n{files}{self.described}\nmetrics: [{', '.join(self.metrics)}]\n"

    def pairs(self, file: Path) -> Iterator[tuple[float, str, str]]:
        """(label, first, second) of every pair that has a label."""
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            for row in islice(rows, int(self.header), None):
                label, first, second = (row[column] for column in self.columns)
                if label:
                    yield float(label) if self.outputs == 1 else int(label), first, second

    def measured(self, found: Any) -> dict[str, float]:
        """The metrics of what Trainer predicted."""
        guessed, labels = np.asarray(found.predictions), np.asarray(found.label_ids)
        if self.outputs > 1:
            guessed = guessed.argmax(axis=1)
            return {"accuracy": float((guessed == labels).mean()), "f1": float(f1_score(labels, guessed))}
        return {
            "spearman": float(spearmanr(guessed[:, 0], labels).statistic),
            "pearson": float(pearsonr(guessed[:, 0], labels).statistic),
        }


TASKS = {
    "headlines": PairTask(
        train="2014-headlines.test.tsv",
        dev="2015-headlines.test.tsv",
        header=False,
        columns=(0, 1, 2),
        outputs=1,
        described="name: headlines\nkind: regression\nfields: {first: 2, second: 3, label: 1}\n"
        'score_range: [0, 5]\nskip_labels: [""]',
        metrics=("spearman", "pearson"),
    ),
    "mrpc": PairTask(
        train="msr_paraphrase_train.txt",
        dev="msr_paraphrase_test.txt",
        header=True,
        columns=(0, 3, 4),
        outputs=2,
        described='name: paraphrases\nkind: pair_classification\nlabels: ["0", "1"]\n'
        'fields: {first: "#1 String", second: "#2 String", label: Quality}',
        metrics=("accuracy", "f1"),
    ),
}


@dataclass(frozen=True)
class Settings:
    """What is the same on both sides. `warmup`: share of the updates."""

    lr: float = 5e-5
    epochs: int = 4
    batch: int = 16
    warmup: float = 0.1
    weight_decay: float = 0.01
    max_length: int = 128


@dataclass(frozen=True)
class Outcome:
    """Metrics of the best epoch. `silence`: the longest time in seconds without a line; None: not measured."""

    side: str
    seed: int
    metrics: dict[str, float]
    seconds: float
    silence: float | None = None


def by_maskfleet(model: Path, data: Path, task: PairTask, settings: Settings, seed: int) -> Outcome:
    """By the command, in a process of its own, whose lines are passed on."""
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "task.yaml"
        described.write_text(task.yaml())
        chosen = [word for name, value in vars(settings).items() for word in ("--set", f"{name}={value}")]
        command = [str(Path(sys.executable).with_name("maskfleet")), "finetune", str(model), str(described)]
        command += ["--data", str(data), "--seed", str(seed), "--json", *chosen]
        began = last = time.monotonic()
        silence, said = 0.0, ""
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                silence, last = max(silence, time.monotonic() - last), time.monotonic()
                note(f"{last - began:6.1f} s  {line.rstrip()[:200]}")
                said = line if line.startswith(("{", "[")) else said
        if process.returncode:
            raise SystemExit(process.returncode)
    metrics = {name: json.loads(said)["metrics"][name] for name in task.metrics}
    return Outcome("maskfleet", seed, metrics, last - began, silence)


def by_trainer(model: Path, data: Path, task: PairTask, settings: Settings, seed: int) -> Outcome:
    """By transformers' own class and Trainer, the files read here."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    tokenizer = AutoTokenizer.from_pretrained(model)

    def rows(name: str) -> list[dict[str, Any]]:
        return [
            dict(tokenizer(first, second, truncation=True, max_length=settings.max_length), labels=score)
            for score, first, second in task.pairs(data / name)
        ]

    set_seed(seed)
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            learning_rate=settings.lr,
            num_train_epochs=settings.epochs,
            per_device_train_batch_size=settings.batch,
            per_device_eval_batch_size=64,
            warmup_steps=settings.warmup,
            weight_decay=settings.weight_decay,
            adam_epsilon=1e-6,
            max_grad_norm=1.0,
            eval_strategy="epoch",
            save_strategy="no",
            seed=seed,
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=AutoModelForSequenceClassification.from_pretrained(model, num_labels=task.outputs),
            args=arguments,
            train_dataset=rows(task.train),
            eval_dataset=rows(task.dev),
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=task.measured,
        )
        trainer.train()
    decisive = f"eval_{task.metrics[0]}"
    epochs = [entry for entry in trainer.state.log_history if decisive in entry]
    best = max(epochs, key=lambda entry: float(entry[decisive]))
    metrics = {name: best[f"eval_{name}"] for name in task.metrics}
    return Outcome("Trainer", seed, metrics, time.monotonic() - began)


SIDES: tuple[Callable[[Path, Path, PairTask, Settings, int], Outcome], ...] = (by_maskfleet, by_trainer)


def table(found: list[Outcome]) -> str:
    """A row a side: means over the seeds, the smallest and the largest in brackets."""
    names = list(found[0].metrics)
    heads = " | ".join(f"{name} x 100" for name in names)
    lines = [f"| | seeds | {heads} | seconds |", "|---" * (len(names) + 3) + "|"]
    for side in dict.fromkeys(one.side for one in found):
        its = [one for one in found if one.side == side]
        figures = [_spread([100 * one.metrics[name] for one in its]) for name in names]
        seconds = statistics.median(one.seconds for one in its)
        lines.append(f"| {side} | {len(its)} | {' | '.join(figures)} | {seconds:.0f} |")
    silences = [one.silence for one in found if one.silence is not None]
    return "\n".join([*lines, f"longest time without a line: {max(silences):.1f} s"])


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main(
    model: Path,
    data: Path,
    task: Annotated[str, typer.Argument(help=", ".join(TASKS))],
    *,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    lr: float = Settings.lr,
    epochs: int = Settings.epochs,
    batch: int = Settings.batch,
) -> None:
    """Prints the table; progress goes to standard error."""
    settings = Settings(lr, epochs, batch)
    found: list[Outcome] = []
    for seed in range(seeds):
        for side in SIDES:
            found.append(side(model, data, TASKS[task], settings, seed))
            note(str(found[-1]))
    typer.echo(table(found))


if __name__ == "__main__":
    run(main)
