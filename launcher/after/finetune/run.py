"""One fine-tuning by transformers' Trainer: it trains on the task's `train` split, chooses the epoch on `dev`, and
measures the other splits. It can write a folder that `AutoModelFor...` loads, with the tokenizer and the results."""

import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from data_service.printable import one_line
from data_service.processes import temporary_folder
from data_service.tokenizers.files import TOKENIZER_FILES
from launcher.after.finetune.encode import EncodedSplit, ExampleEncoder, Scores, head_for_task
from launcher.after.finetune.model import (
    check_tokenizer_fits_model,
    layerwise_parameter_groups,
    open_model,
    open_tokenizer,
    silence_transformers,
)
from launcher.after.finetune.pretrained import LocalModel, require_transformers_class
from launcher.after.finetune.settings import Epoch, FinetuneOutcome, FinetuneSettings, TrainingDiverged
from launcher.after.finetune.trainer import training_arguments, training_callback
from launcher.after.tasks.examples import Examples
from launcher.after.tasks.metrics import check_metrics_defined
from launcher.after.tasks.task import Task, hash_examples
from launcher.errors import EVALUATE_EXTRA, import_optional
from launcher.progress import work
from launcher.runtime.run.log import encode_line

_LOG = logging.getLogger("launcher.after.finetune")
_EVALUATION_BATCH_ROWS = 64  # number of rows in a batch when splits are measured
RESULTS_FILE = "results.json"  # results and settings, written beside the fine-tuned model
_PIPELINE_BY_HEAD = {  # transformers' pipeline for the model card, by head
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
}


def finetune(
    pretrained: LocalModel,
    task: Task,
    settings: FinetuneSettings,
    seed: int,
    out: Path | None = None,
) -> FinetuneOutcome:
    """Fine-tune a model for a task.

    `out`: empty folder for the model with the chosen epoch's weights; None: it is not written.

    Raises:
        TaskMismatch: if checkpoint, tokenizer, task and settings do not fit each other.
        TrainingDiverged: if a loss or an output is not finite.
        TaskError, InputError, StoreError: if the task's data are wrong, or cannot be read.
        ModelError: if transformers has no class for the model.
        MissingPackage: if a library is not installed.
    """
    require_transformers_class(pretrained.folder, pretrained.name)
    head, examples = head_for_task(task), read_splits(task)
    with ExitStack() as stack:
        transformers = import_optional("transformers", "fine-tuning", EVALUATE_EXTRA)
        stack.enter_context(silence_transformers())
        transformers.set_seed(seed)
        model = open_model(pretrained.folder, head, tuple(task.labels))
        tokenizer = open_tokenizer(pretrained.folder)
        longest = check_tokenizer_fits_model(tokenizer, model, pretrained.folder, settings.max_length)
        last = model.config.model_type == "xlnet" and head == "SequenceClassification"
        tokenizer.padding_side = "left" if last else "right"  # XLNet's classifier reads the last token
        encoder = ExampleEncoder(task, tokenizer, settings, longest)
        splits = {name: _encode_split(encoder, name, read) for name, read in examples.items()}
        scratch = stack.enter_context(temporary_folder("finetune"))
        outcome = _train_and_measure(model, encoder, splits, seed, scratch)
        if out is not None:
            digest = hash_examples(task, examples)
            write_model_folder(model, out, Provenance(pretrained, task, digest, settings, seed, outcome))
        return outcome


def _encode_split(encoder: ExampleEncoder, name: str, examples: Examples) -> EncodedSplit:
    with work(f"splitting {name} into tokens"):
        return encoder.encode(examples)


def read_splits(task: Task) -> dict[str, Examples]:
    """Read every split, `train` and `dev` first. Raises TaskError, InputError, StoreError as `Task.read`; also
    TaskError if a metric is undefined on a split other than `train`."""
    found = {}
    for split in dict.fromkeys(("train", "dev", *task.splits)):
        with work(f"reading {split}"):
            found[split] = task.read(split)
        if split != "train":
            check_metrics_defined(task, found[split], f"the split {split}")
    return found


def _train_and_measure(
    model: Any, encoder: ExampleEncoder, splits: Mapping[str, EncodedSplit], seed: int, scratch: Path
) -> FinetuneOutcome:
    """Train, measure and return the outcome. At the end, `model` has the weights of the chosen epoch."""
    trainer = _build_trainer(model, encoder, splits, seed, scratch)
    with work("training", unit="updates") as now:
        trainer.add_callback(training_callback(now, partial(_show_figures, encoder)))
        trainer.train()
    each = math.ceil(len(splits["train"].dataset) / encoder.settings.batch)
    last = trainer.state.global_step
    best = last if encoder.settings.keep == "last" else trainer.state.best_global_step or last
    dev = _measure_split(trainer, splits["dev"])
    others = {
        name: _measure_split(trainer, split, dev.threshold).metrics
        for name, split in splits.items()
        if name not in ("train", "dev")
    }
    curves = _epoch_curves(trainer.state.log_history, tuple(dev.metrics))
    return FinetuneOutcome(dev.metrics, round(best / each), curves, dev.threshold, others)


def _build_trainer(
    model: Any, encoder: ExampleEncoder, splits: Mapping[str, EncodedSplit], seed: int, scratch: Path
) -> Any:
    transformers = import_optional("transformers", "fine-tuning", EVALUATE_EXTRA)
    settings = encoder.settings
    tagged = encoder.head == "TokenClassification"  # the labels of its tokens must be padded, too
    collator = transformers.DataCollatorForTokenClassification if tagged else transformers.DataCollatorWithPadding
    optimizer = None
    if settings.layer_decay < 1:
        groups, betas = layerwise_parameter_groups(model, settings), settings.adam_betas
        optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.adam_epsilon)
    patience = [] if settings.patience is None else [transformers.EarlyStoppingCallback(settings.patience)]
    trainer = transformers.Trainer(
        model=model,
        args=_training_arguments(encoder, seed, scratch),
        train_dataset=splits["train"].dataset,
        eval_dataset=splits["dev"].dataset,
        data_collator=collator(encoder.tokenizer),
        compute_metrics=lambda found: _score_outputs(splits["dev"], found.predictions).metrics,
        optimizers=(optimizer, None),
        callbacks=patience,
    )
    trainer.remove_callback(transformers.PrinterCallback)  # it would print all logged values
    # If this is true, losses of microbatches are summed: several classes of transformers accept the number of targets
    # in the whole batch, but do not divide by it.
    trainer.model_accepts_loss_kwargs = False
    return trainer


def _training_arguments(encoder: ExampleEncoder, seed: int, scratch: Path) -> Any:
    transformers = import_optional("transformers", "fine-tuning", EVALUATE_EXTRA)
    settings = encoder.settings
    rows, best = settings.microbatch or settings.batch, settings.keep == "best"
    return training_arguments(
        transformers.TrainingArguments,
        settings,
        seed=seed,
        scratch=scratch,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=settings.batch // rows,
        per_device_eval_batch_size=_EVALUATION_BATCH_ROWS,
        adam_beta1=settings.adam_betas[0],
        adam_beta2=settings.adam_betas[1],
        adam_epsilon=settings.adam_epsilon,
        max_grad_norm=settings.clip,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="epoch" if best else "no",
        load_best_model_at_end=best,
        metric_for_best_model=f"eval_{encoder.task.metrics[0]}",
        dataloader_pin_memory=False,
    )


def _measure_split(trainer: Any, split: EncodedSplit, threshold: float | None = None) -> Scores:
    trainer.compute_metrics = None
    return _score_outputs(split, trainer.predict(split.dataset).predictions, threshold)


def _score_outputs(split: EncodedSplit, outputs: Any, threshold: float | None = None) -> Scores:
    """Return the metrics of the Trainer's outputs; outputs after the logits are ignored. Raises TrainingDiverged."""
    wanted = 2 if "start_positions" in split.dataset.column_names else 1
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    if not all(np.isfinite(part).all() for part in found[:wanted]):
        raise TrainingDiverged("outputs of the model are not finite", remedy="lower lr, or lengthen warmup")
    logits: Any = found[0] if wanted == 1 else found[:2]
    return split.compute_scores(logits, threshold)


def _epoch_curves(history: Sequence[Mapping[str, float]], metrics: Sequence[str]) -> tuple[Epoch, ...]:
    """Return the completed epochs. `history`: the Trainer's log. `metrics`: names of the metrics on dev."""
    losses = [record["loss"] for record in history if "loss" in record]
    measured = [record for record in history if f"eval_{metrics[0]}" in record]
    return tuple(
        Epoch(number, loss, {metric: record[f"eval_{metric}"] for metric in metrics})
        for number, (loss, record) in enumerate(zip(losses, measured, strict=False), 1)
    )


def _show_figures(encoder: ExampleEncoder, state: Any, logs: Mapping[str, float]) -> None:
    """Log the figures of an epoch. Raises TrainingDiverged for a loss that is not finite."""
    figures = {name: value for name, value in logs.items() if name == "loss" or "eval_" in name}
    if not math.isfinite(figures.get("loss", 0.0)):
        raise TrainingDiverged(
            f"the loss is no longer finite in epoch {state.epoch:g}", remedy="lower lr, or lengthen warmup"
        )
    told = ", ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in figures.items())
    if told and "runtime" not in told:
        _LOG.info("%s, epoch %g of %g: %s", encoder.task.name, state.epoch, encoder.settings.epochs, told)


@dataclass(frozen=True)
class Provenance:
    """The result of a fine-tuning, and everything that it depends on.

    Attributes:
        pretrained: the model that was fine-tuned.
        task_digest: digest of the task's settings and of the examples that were read.
    """

    pretrained: LocalModel
    task: Task
    task_digest: str
    settings: FinetuneSettings
    seed: int
    outcome: FinetuneOutcome


def write_model_folder(model: Any, folder: Path, provenance: Provenance) -> None:
    """Write the model, its tokenizer's files, `results.json` and a card into `folder`."""
    model.save_pretrained(str(folder))
    for name in TOKENIZER_FILES:
        if (provenance.pretrained.folder / name).is_file():
            shutil.copyfile(provenance.pretrained.folder / name, folder / name)
    # `encode_line` writes null for numbers that are not finite.
    record = json.dumps(json.loads(encode_line(_results_record(provenance))), indent=2, ensure_ascii=False)
    (folder / RESULTS_FILE).write_text(record + "\n", "utf-8")
    (folder / "README.md").write_text(_model_card(model, provenance), "utf-8")


def _results_record(provenance: Provenance) -> dict[str, object]:
    checkpoint = {name: getattr(provenance.pretrained, name) for name in ("source", "step", "digest")}
    return {
        "task": provenance.task.name,
        "kind": provenance.task.kind,
        "task_digest": provenance.task_digest,
        "checkpoint": checkpoint,
        "settings": provenance.settings.model_dump(mode="json"),
        "seed": provenance.seed,
        **provenance.outcome.as_record(),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
    }


def _model_card(model: Any, provenance: Provenance) -> str:
    fields = {
        "library_name": "transformers",
        "pipeline_tag": _PIPELINE_BY_HEAD[head_for_task(provenance.task)],
        "tags": ["maskfleet", model.config.model_type],
    }
    figures = ", ".join(f"{metric} {value:.4f}" for metric, value in provenance.outcome.metrics.items())
    start, name = one_line(provenance.pretrained.name), type(model).__name__
    return (
        f"---\n{yaml.safe_dump(fields, sort_keys=True)}---\n\n# {provenance.task.name}\n\n"
        f"{start}, fine-tuned on {provenance.task.name} with Maskfleet (seed {provenance.seed}). "
        f"transformers loads it as `{name}`.\n\n"
        f"On the task's dev split, after epoch {provenance.outcome.best_epoch}, whose weights these are: {figures}.\n\n"
        f"Settings and curves are in `{RESULTS_FILE}`.\n"
    )
