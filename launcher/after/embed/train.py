"""One embedding training: a function of the weights, the rows, the settings and the seed.

Model, losses, batches and loop are sentence-transformers' own. This module puts them together, makes the losses from
the settings, and lets a killed training continue.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch

from data_service.processes import temporary_folder
from encoder_core.errors import ModelError
from launcher.after.embed.model import library, load_model, say_what_is_cut
from launcher.after.embed.ranking import ranking_loss
from launcher.after.embed.rows import TextColumns, read_source
from launcher.after.embed.settings import (
    Angle,
    Cosent,
    Cosine,
    EmbedTraining,
    Loss,
    MultipleNegatives,
    RowSource,
    Softmax,
    Triplet,
)
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.resume import Scratch, open_scratch, seal
from launcher.errors import EVALUATE, TaskError, optional
from launcher.progress import Work, work

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import nn


def make_loss(model: "SentenceTransformer", training: EmbedTraining, train: TextColumns) -> "nn.Module":
    """Return the module that the trainer calls with a batch's columns and labels. Its random numbers come from torch's
    seed.

    Raises ModelError if a Matryoshka length exceeds that of the model's vectors.
    """
    losses = library("losses")
    loss: nn.Module = _plain(losses, model, training.loss, train)
    if training.matryoshka is None:
        return loss
    width = model.get_embedding_dimension()
    if max(training.matryoshka) > width:
        raise ModelError(
            f"matryoshka has {max(training.matryoshka)}, and the model's vectors have {width} numbers",
            remedy=f"give lengths up to {width}, and {width} itself",
        )
    wrapped: nn.Module = losses.MatryoshkaLoss(model, loss, list(training.matryoshka))
    return wrapped


def check_rows(loss: Loss, train: TextColumns, dev: TextColumns | None) -> None:
    """Raise TaskError if the training rows do not fit the loss, or vectors cannot be measured on the dev rows."""
    texts, scored = len(train.texts), train.labels is not None and not train.classes
    match loss:
        case Softmax():
            fits, wanted = texts == 2 and bool(train.classes), "two texts, and a label of several classes"
        case Cosine() | Cosent() | Angle():
            fits, wanted = texts == 2 and scored, "two texts and a score"
        case Triplet():
            fits, wanted = texts == 3 and train.labels is None, "three texts and no label"
        case MultipleNegatives():
            fits, wanted = train.labels is None, "two texts or more and no label"
        case _:
            assert_never(loss)
    if not fits:
        raise TaskError(
            f"train is not what the loss {loss.kind} compares: {wanted}", remedy="choose other data or loss"
        )
    if dev is not None and (dev.classes or len(dev.texts) != (3 if dev.labels is None else 2)):
        raise TaskError(
            "dev is neither pairs with scores nor triplets",
            remedy="measure on pairs with scores, or triplets",
        )


def _plain(losses: Any, model: "SentenceTransformer", loss: Loss, train: TextColumns) -> Any:
    match loss:
        case Softmax():
            return losses.SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=len(train.classes))
        case Cosine():
            return losses.CosineSimilarityLoss(model)
        case Triplet():
            distance = getattr(losses.TripletDistanceMetric, loss.distance.upper())
            return losses.TripletLoss(model, distance_metric=distance, triplet_margin=loss.margin)
        case MultipleNegatives():
            return ranking_loss(model, loss, train)
        case Cosent():
            return losses.CoSENTLoss(model, scale=loss.scale)
        case Angle():
            return losses.AnglELoss(model, scale=loss.scale)
        case _:
            assert_never(loss)


_LOG = logging.getLogger(__name__)
_LINES = 20  # with losses, a training
_LOSS = "loss.safetensors"
_PACKAGES = ("sentence-transformers", "transformers", "accelerate", "torch", "datasets")


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        model: the model with the chosen weights.
        rows: number of rows of training data.
        steps: number of trained steps.
        dev: figures of the chosen weights on `dev`; empty without dev rows.
        history: records of the trainer: loss and learning rate by step, figures on dev.
        resumed: step from which the training resumed; 0 if it started from the beginning.
    """

    model: "SentenceTransformer"
    rows: int
    steps: int
    dev: dict[str, float]
    history: tuple[dict[str, float], ...]
    resumed: int


def train_embeddings(pretrained: LocalModel, training: EmbedTraining, scratch: Path | None = None) -> Trained:
    """Train `pretrained` as `training` says.

    `scratch`: folder of this machine for checkpoints, from which an interrupted training resumes to the same weights;
    None: it can only start again. The caller removes the folder (`Scratch.remove`) when the result is safe.

    Raises:
        TaskError, InputError, StoreError: if the data cannot be read, or do not fit the loss.
        ModelError: if the model cannot be used, or its weights are no longer finite.
        RunError: if `scratch` cannot be used.
        MissingPackage: if sentence-transformers is not installed.
    """
    train = read_source(training.train, training.root)
    dev = read_source(training.dev, training.root) if training.dev is not None else None
    return train_on_rows(pretrained, training, train, dev, scratch)


def train_on_rows(
    pretrained: LocalModel,
    training: EmbedTraining,
    train: TextColumns,
    dev: TextColumns | None,
    scratch: Path | None = None,
) -> Trained:
    """Train as `train_embeddings`, on rows that have been read already."""
    check_rows(training.loss, train, dev)
    model = load_model(pretrained, training)
    say_what_is_cut(model, (text for column in train.texts.values() for text in column), "train")
    with _opened(scratch, identity(pretrained, training, train, dev)) as place:
        return _train(model, training, train, dev, place)


def identity(
    pretrained: LocalModel, training: EmbedTraining, train: TextColumns, dev: TextColumns | None
) -> dict[str, object]:
    """Return all that decides the trained weights."""
    return {
        "weights": pretrained.digest,
        "settings": training.model_dump(mode="json"),
        "train": train.digest,
        "dev": dev.digest if dev is not None else None,
        "versions": {name: metadata.version(name) for name in _PACKAGES},
    }


@contextmanager
def _opened(scratch: Path | None, what: dict[str, object]) -> Iterator[Scratch]:
    if scratch is not None:
        with open_scratch(scratch, what) as opened:
            yield opened
        return
    with temporary_folder("embed") as name:
        yield Scratch(name, kept=False)


def _train(
    model: "SentenceTransformer",
    training: EmbedTraining,
    train: TextColumns,
    dev: TextColumns | None,
    place: Scratch,
) -> Trained:
    transformers = optional("transformers", "maskfleet embed", EVALUATE)
    model.model_card_data.generate_widget_examples = False  # the model card is ours
    transformers.set_seed(training.seed)  # the head of softmax is drawn now
    loss = make_loss(model, training, train)
    evaluator = None if dev is None or training.dev is None else _evaluator(dev, training, training.dev)
    trainer = optional("sentence_transformers", "maskfleet embed", EVALUATE).SentenceTransformerTrainer(
        model=model,
        args=_arguments(training, train, evaluator, place),
        train_dataset=_dataset(train, training.loss),
        loss=loss,
        evaluator=evaluator,
        callbacks=[_records(place, loss)],
    )
    trainer.remove_callback(transformers.PrinterCallback)  # prints every record
    newest = place.newest()
    if newest is not None:
        _LOG.info("goes on from %s", newest)
        _restore_loss(newest, loss)
    with work("training", unit="steps") as now:
        trainer.add_callback(_progress(now))
        trainer.train(resume_from_checkpoint=str(newest) if newest is not None else None)
    _check_finite(model, trainer.state.global_step)
    model.eval()
    return Trained(
        model=model,
        rows=len(train),
        steps=trainer.state.global_step,
        dev=evaluator(model) if evaluator is not None else {},
        history=tuple(trainer.state.log_history),
        resumed=int(newest.name.rpartition("-")[2]) if newest is not None else 0,
    )


def _dataset(rows: TextColumns, loss: Loss) -> Any:
    """Return a data set with the columns in the order of the loss. The columns get our own names, since some names have
    a meaning for the trainer. The label of rows that are ranked is the row's index."""
    columns: dict[str, Any] = {
        f"text{number}": column for number, column in enumerate(rows.texts.values(), start=1)
    }
    if rows.labels is not None:
        columns["label"] = rows.labels
    elif isinstance(loss, MultipleNegatives):
        columns["label"] = list(range(len(rows)))
    return optional("datasets", "maskfleet embed", EVALUATE).Dataset.from_dict(columns)


def _arguments(training: EmbedTraining, train: TextColumns, evaluator: object, place: Scratch) -> Any:
    optional("accelerate", "maskfleet embed", EVALUATE)
    when = "epoch" if training.every is None else "steps"
    steps = -(-len(train) // training.batch) * training.epochs
    measured = evaluator is not None
    best = measured and training.keep == "best"
    arguments = library("training_args").SentenceTransformerTrainingArguments(
        output_dir=str(place.folder),
        per_device_train_batch_size=training.batch,
        per_device_eval_batch_size=training.batch,
        num_train_epochs=training.epochs,
        learning_rate=training.lr,
        lr_scheduler_type="linear",
        warmup_steps=training.warmup,
        weight_decay=training.weight_decay,
        seed=training.seed,
        data_seed=training.seed,
        full_determinism=training.deterministic,
        bf16=training.precision == "bf16",
        prompts=_prompts_by_column(training),
        batch_sampler="batch_sampler",  # "no_duplicates" silently drops rows that fit into no batch
        save_strategy=when if place.kept or best else "no",
        eval_strategy=when if measured else "no",
        save_steps=training.every or steps,
        eval_steps=training.every,
        save_total_limit=2,
        load_best_model_at_end=best,
        metric_for_best_model=f"eval_{getattr(evaluator, 'primary_metric', '')}" if best else None,
        greater_is_better=True if best else None,
        logging_steps=max(1, steps // _LINES),
        logging_nan_inf_filter=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # else the batch is as many times larger as there are GPUs
    return arguments


def _prompts_by_column(training: EmbedTraining) -> dict[str, str] | None:
    named = {
        f"text{number}": training.prompts[name]
        for number, name in enumerate(training.train.prompts, start=1)
        if name is not None
    }
    return named or None


def _evaluator(dev: TextColumns, training: EmbedTraining, source: RowSource) -> Any:
    """Return sentence-transformers' evaluator: rank correlation of scored pairs, or share of correct triplets."""
    evaluation = library("evaluation")
    names = source.prompts or (None,) * len(dev.texts)
    columns = [
        texts if name is None else [training.prompts[name] + text for text in texts]
        for name, texts in zip(names, dev.texts.values(), strict=True)
    ]
    shared = {"name": "dev", "batch_size": training.batch, "write_csv": False}
    if dev.labels is not None:
        evaluator = evaluation.EmbeddingSimilarityEvaluator(
            *columns, dev.labels, main_similarity="cosine", **shared
        )
        evaluator.primary_metric = "dev_spearman_cosine"
    else:
        evaluator = evaluation.TripletEvaluator(*columns, similarity_fn_names=["cosine"], **shared)
        evaluator.primary_metric = "dev_cosine_accuracy"
    return evaluator


def _progress(now: Work) -> Any:
    """Return the trainer's callback that shows the progress after each step."""
    transformers = optional("transformers", "maskfleet embed", EVALUATE)

    class Progress(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            now.begin_at(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            now.at(state.global_step, state.max_steps)

    return Progress()


def _records(place: Scratch, loss: "nn.Module") -> Any:
    """Return what is told while it trains, and what completes a checkpoint."""
    transformers = optional("transformers", "maskfleet embed", EVALUATE)

    class Records(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            figures = {name: value for name, value in (logs or {}).items() if name in _TOLD}
            if figures:
                told = ", ".join(f"{_TOLD[name]} {value:.4g}" for name, value in figures.items())
                _LOG.info("step %s of %s: %s", f"{state.global_step:,}", f"{state.max_steps:,}", told)

        def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            checkpoint = place.folder / f"checkpoint-{state.global_step}"
            _keep_loss(checkpoint, loss)
            seal(checkpoint)

    return Records()


def _keep_loss(checkpoint: Path, loss: "nn.Module") -> None:
    """Save the loss's own weights, such as those of softmax, beside the trainer's files."""
    from safetensors.torch import save_file

    weights = _own_weights(loss)
    if weights:
        save_file({name: weight.detach().cpu() for name, weight in weights.items()}, checkpoint / _LOSS)


def _restore_loss(checkpoint: Path, loss: "nn.Module") -> None:
    from safetensors.torch import load_file

    if _own_weights(loss):
        loss.load_state_dict(load_file(checkpoint / _LOSS), strict=False)


def _own_weights(loss: "nn.Module") -> "dict[str, nn.Parameter]":
    """Return those that are not the model's, which every loss holds as `model`."""
    return {name: weight for name, weight in loss.named_parameters() if "model" not in name.split(".")[:-1]}


_TOLD = {
    "loss": "loss",
    "learning_rate": "lr",
    "eval_dev_spearman_cosine": "dev spearman",
    "eval_dev_cosine_accuracy": "dev accuracy",
}


def _check_finite(model: "nn.Module", step: int) -> None:
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise ModelError(
                f"after step {step:,} {name} is no longer finite", remedy="give a lower lr, or more warmup"
            )
