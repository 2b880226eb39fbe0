"""A fine-tuning by `maskfleet finetune` and by transformers' Trainer: python tests/bench/finetune_trainer.py MODEL STS.

MODEL is a folder in the transformers format, STS the folder of SemEval's headlines of 2014 and 2015 (`score<TAB>
sentence<TAB>sentence`). Both train on the pairs of 2014 and are measured on those of 2015 after every epoch, with the
same learning rate, epochs, batch, warmup, weight decay, clipping and cut of the inputs; the epoch with the highest
Spearman's correlation counts. Order, dropout and the head's first weights are drawn differently, so figures are means
over seeds.
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
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from program import note, run
from scipy.stats import pearsonr, spearmanr

TRAIN, DEV = "2014-headlines.test.tsv", "2015-headlines.test.tsv"
TASK = f"""name: headlines
kind: regression
published: SemEval
files: {{train: {TRAIN}, dev: {DEV}}}
format: tsv
fields: {{first: 2, second: 3, label: 1}}
score_range: [0, 5]
skip_labels: [""]
metrics: [spearman, pearson]
"""


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
    """Correlations of the best epoch. `silence`: the longest time in seconds without a line; None: not measured."""

    side: str
    seed: int
    spearman: float
    pearson: float
    seconds: float
    silence: float | None = None


def by_maskfleet(model: Path, data: Path, settings: Settings, seed: int) -> Outcome:
    """By the command, in a process of its own, whose lines are passed on."""
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "headlines.yaml"
        task.write_text(TASK)
        chosen = [word for name, value in vars(settings).items() for word in ("--set", f"{name}={value}")]
        command = [str(Path(sys.executable).with_name("maskfleet")), "finetune", str(model), str(task)]
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
    metrics = json.loads(said)["metrics"]
    return Outcome("maskfleet", seed, metrics["spearman"], metrics["pearson"], last - began, silence)


def by_trainer(model: Path, data: Path, settings: Settings, seed: int) -> Outcome:
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
            for score, first, second in pairs(data / name)
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
            model=AutoModelForSequenceClassification.from_pretrained(model, num_labels=1),
            args=arguments,
            train_dataset=rows(TRAIN),
            eval_dataset=rows(DEV),
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=_correlations,
        )
        trainer.train()
    epochs = [entry for entry in trainer.state.log_history if "eval_spearman" in entry]
    best = max(epochs, key=lambda entry: float(entry["eval_spearman"]))
    taken = time.monotonic() - began
    return Outcome("Trainer", seed, best["eval_spearman"], best["eval_pearson"], taken)


def _correlations(found: Any) -> dict[str, float]:
    guessed, scores = np.asarray(found.predictions)[:, 0], np.asarray(found.label_ids)
    return {
        "spearman": float(spearmanr(guessed, scores).statistic),
        "pearson": float(pearsonr(guessed, scores).statistic),
    }


def pairs(file: Path) -> Iterator[tuple[float, str, str]]:
    """(score, first, second) of every pair that was scored."""
    with file.open(encoding="utf-8", newline="") as lines:
        for score, first, second in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            if score:
                yield float(score), first, second


SIDES: tuple[Callable[[Path, Path, Settings, int], Outcome], ...] = (by_maskfleet, by_trainer)


def table(found: list[Outcome]) -> str:
    """A row a side: means over the seeds, the smallest and the largest in brackets."""
    lines = ["| | seeds | Spearman x 100 | Pearson x 100 | seconds |", "|---|---|---|---|---|"]
    for side in dict.fromkeys(one.side for one in found):
        its = [one for one in found if one.side == side]
        figures = [
            _spread([100 * value for value in values])
            for values in ([one.spearman for one in its], [one.pearson for one in its])
        ]
        seconds = statistics.median(one.seconds for one in its)
        lines.append(f"| {side} | {len(its)} | {figures[0]} | {figures[1]} | {seconds:.0f} |")
    silences = [one.silence for one in found if one.silence is not None]
    return "\n".join([*lines, f"longest time without a line: {max(silences):.1f} s"])


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main(
    model: Path,
    sts: Path,
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
            found.append(side(model, sts, settings, seed))
            note(str(found[-1]))
    typer.echo(table(found))


if __name__ == "__main__":
    run(main)
