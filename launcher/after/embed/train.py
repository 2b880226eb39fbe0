"""One embedding training: model, losses, batches and loop are sentence-transformers' own; this module puts them
together from the settings, and exports the folder that `SentenceTransformer(...)` loads, with a model card."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch
import yaml

from checkpoints.hf.export import MODEL_CARD, publish_on_exit
from data_service.printable import one_line
from data_service.processes import temporary_folder
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from launcher.after.embed.model import import_sbert_module, load_model, warn_of_truncation
from launcher.after.embed.rows import TextColumns, read_text_columns
from launcher.after.embed.settings import (
    CosineLoss,
    EmbedTrainingSettings,
    LossSettings,
    MultipleNegativesLoss,
    OrderingLoss,
    RowSource,
    SoftmaxLoss,
    TripletLoss,
)
from launcher.after.export.model_card import licence_identifier
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.trainer import training_arguments, training_callback
from launcher.errors import EVALUATE_EXTRA, TaskError, import_optional
from launcher.progress import work

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_LOG = logging.getLogger(__name__)
_LOGGED_LOSSES = 20  # number of times that a training logs its loss
_SHOWN_METRIC_NAMES = {  # names in our log, by the Trainer's names
    "loss": "loss",
    "learning_rate": "lr",
    "eval_dev_spearman_cosine": "dev spearman",
    "eval_dev_cosine_accuracy": "dev accuracy",
}


@dataclass(frozen=True)
class TrainingResult:
    """The result of an embedding training.

    Attributes:
        model: the model with the chosen weights.
        rows: number of rows of training data.
        steps: number of trained steps.
        dev: figures of the chosen weights on `dev`; empty without dev rows.
    """

    model: "SentenceTransformer"
    rows: int
    steps: int
    dev: dict[str, float]


def train_embeddings(pretrained: LocalModel, training: EmbedTrainingSettings) -> TrainingResult:
    """Train the model `pretrained` with the settings `training`.

    Raises:
        TaskError, InputError, StoreError: if the data cannot be read, or do not fit the loss.
        ModelError: if the model cannot be used, or its weights are no longer finite.
        MissingPackage: if sentence-transformers is not installed.
    """
    library = import_optional("sentence_transformers", "maskfleet embed", EVALUATE_EXTRA)
    transformers = import_optional("transformers", "maskfleet embed", EVALUATE_EXTRA)

    train = read_text_columns(training.train, training.data_folder)
    dev = read_text_columns(training.dev, training.data_folder) if training.dev is not None else None
    check_rows_fit_loss(training.loss, train, dev)
    model = load_model(pretrained, training)
    warn_of_truncation(model, (text for column in train.texts.values() for text in column), "train")
    model.model_card_data.generate_widget_examples = False  # we write the model card ourselves
    transformers.set_seed(training.seed)  # the classifier of the softmax loss is initialized now
    evaluator = None if dev is None or training.dev is None else _build_evaluator(dev, training, training.dev)
    with temporary_folder("embed") as place, work("training", unit="steps") as now:
        trainer = library.SentenceTransformerTrainer(
            model=model,
            args=_training_arguments(training, train, evaluator, place),
            train_dataset=_build_dataset(train),
            loss=_build_loss(model, training, len(train.classes)),
            evaluator=evaluator,
            callbacks=[training_callback(now, _show_figures)],
        )
        trainer.remove_callback(transformers.PrinterCallback)  # it would print all logged values
        trainer.train()
        _check_weights_finite(model, trainer.state.global_step)
    model.eval()
    return TrainingResult(
        model, len(train), trainer.state.global_step, evaluator(model) if evaluator is not None else {}
    )


def check_rows_fit_loss(loss: LossSettings, train: TextColumns, dev: TextColumns | None) -> None:
    """Raise TaskError if the rows of train do not fit the loss, or the rows of dev are unfit to measure vectors."""
    texts, scored = len(train.texts), train.labels is not None and not train.classes
    match loss:
        case SoftmaxLoss():
            fits, wanted = texts == 2 and bool(train.classes), "two texts, and a label of several classes"
        case CosineLoss() | OrderingLoss():
            fits, wanted = texts == 2 and scored, "two texts and a score"
        case TripletLoss():
            fits, wanted = texts == 3 and train.labels is None, "three texts and no label"
        case MultipleNegativesLoss():
            fits, wanted = train.labels is None, "two texts or more and no label"
        case _:
            assert_never(loss)
    if not fits:
        raise TaskError(
            f"the loss {loss.kind} needs rows of {wanted}, which the rows of train are not",
            remedy="choose other data or another loss",
        )
    if dev is not None and (dev.classes or len(dev.texts) != (3 if dev.labels is None else 2)):
        raise TaskError(
            "the rows of dev are neither pairs with scores nor triplets",
            remedy="give dev pairs with scores, or triplets",
        )


def _build_loss(model: "SentenceTransformer", training: EmbedTrainingSettings, class_count: int) -> Any:
    """Return sentence-transformers' loss. Raises ModelError if a Matryoshka length exceeds that of the vectors."""
    losses, width = import_sbert_module("losses"), model.get_embedding_dimension()
    loss = _build_base_loss(losses, model, training.loss, class_count)
    if training.matryoshka is None:
        return loss
    if max(training.matryoshka) > width:
        raise ModelError(
            f"matryoshka has the length {max(training.matryoshka)}, but the model's vectors have {width} numbers",
            remedy=f"give lengths below {width}, and {width} itself",
        )
    return losses.MatryoshkaLoss(model, loss, list(training.matryoshka))


def _build_base_loss(losses_module: Any, model: "SentenceTransformer", loss: LossSettings, class_count: int) -> Any:
    match loss:
        case SoftmaxLoss():
            return losses_module.SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=class_count)
        case CosineLoss():
            return losses_module.CosineSimilarityLoss(model)
        case TripletLoss():
            distance = getattr(losses_module.TripletDistanceMetric, loss.distance.upper())
            return losses_module.TripletLoss(model, distance_metric=distance, triplet_margin=loss.margin)
        case MultipleNegativesLoss():
            given: dict[str, Any] = {"scale": loss.scale}
            if loss.symmetric:
                given |= {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
            if loss.mini_batch is None:
                return losses_module.MultipleNegativesRankingLoss(model, **given)
            return losses_module.CachedMultipleNegativesRankingLoss(model, mini_batch_size=loss.mini_batch, **given)
        case OrderingLoss():
            kind = losses_module.CoSENTLoss if loss.kind == "cosent" else losses_module.AnglELoss
            return kind(model, scale=loss.scale)
        case _:
            assert_never(loss)


def _build_dataset(rows: TextColumns) -> Any:
    """Return a data set with the columns in the order of the loss. They are renamed, because the trainer treats columns
    of some names differently."""
    columns: dict[str, Any] = {f"text{number}": texts for number, texts in enumerate(rows.texts.values(), 1)}
    if rows.labels is not None:
        columns["label"] = rows.labels
    return import_optional("datasets", "maskfleet embed", EVALUATE_EXTRA).Dataset.from_dict(columns)


def _training_arguments(
    training: EmbedTrainingSettings, train: TextColumns, evaluator: object, output_folder: Path
) -> Any:
    when = "epoch" if training.every is None else "steps"
    steps = -(-len(train) // training.batch) * training.epochs
    best = evaluator is not None and training.keep == "best"
    ranked = isinstance(training.loss, MultipleNegativesLoss)
    return training_arguments(
        import_sbert_module("training_args").SentenceTransformerTrainingArguments,
        training,
        seed=training.seed,
        scratch=output_folder,
        per_device_train_batch_size=training.batch,
        per_device_eval_batch_size=training.batch,
        prompts=_prompts_by_column(training),
        # Equal texts in a batch would be negatives of each other.
        batch_sampler="no_duplicates" if ranked else "batch_sampler",
        save_strategy=when if best else "no",
        eval_strategy=when if evaluator is not None else "no",
        save_steps=training.every or steps,
        eval_steps=training.every,
        load_best_model_at_end=best,
        metric_for_best_model=f"eval_{getattr(evaluator, 'primary_metric', '')}" if best else None,
        logging_steps=max(1, steps // _LOGGED_LOSSES),
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def _prompts_by_column(training: EmbedTrainingSettings) -> dict[str, str] | None:
    named = {
        f"text{number}": training.prompts[name]
        for number, name in enumerate(training.train.prompts, start=1)
        if name is not None
    }
    return named or None


def _build_evaluator(dev: TextColumns, training: EmbedTrainingSettings, source: RowSource) -> Any:
    """Return sentence-transformers' evaluator: rank correlation of scored pairs, or share of correct triplets."""
    evaluation = import_sbert_module("evaluation")
    names = source.prompts or (None,) * len(dev.texts)
    columns = [
        texts if name is None else [training.prompts[name] + text for text in texts]
        for name, texts in zip(names, dev.texts.values(), strict=True)
    ]
    shared = {"name": "dev", "batch_size": training.batch, "write_csv": False}
    if dev.labels is not None:
        evaluator = evaluation.EmbeddingSimilarityEvaluator(*columns, dev.labels, main_similarity="cosine", **shared)
        evaluator.primary_metric = "dev_spearman_cosine"
    else:
        evaluator = evaluation.TripletEvaluator(*columns, similarity_fn_names=["cosine"], **shared)
        evaluator.primary_metric = "dev_cosine_accuracy"
    return evaluator


def _show_figures(state: Any, logs: Mapping[str, float]) -> None:
    figures = {_SHOWN_METRIC_NAMES[name]: value for name, value in logs.items() if name in _SHOWN_METRIC_NAMES}
    if figures:
        said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        _LOG.info("step %s of %s: %s", f"{state.global_step:,}", f"{state.max_steps:,}", said)


def _check_weights_finite(model: "SentenceTransformer", step: int) -> None:
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise ModelError(
                f"after step {step:,} the weights {name} are not finite", remedy="give a lower lr, or more warmup"
            )


def export_embeddings(
    trained: TrainingResult,
    pretrained: LocalModel,
    training: EmbedTrainingSettings,
    out: str,
    licence: str | None = None,
) -> None:
    """Write the model to the folder or s3:// URI `out`, whole or not at all; an earlier export there is replaced.

    `licence`: licence of the model for the card. Raises ExportError if `out` holds something else, and StoreError.
    """
    with publish_on_exit(open_store(out)) as folder:
        trained.model.save_pretrained(str(folder), create_model_card=False)
        card = _model_card(trained, pretrained, training, licence)
        (folder / MODEL_CARD).write_text(card, encoding="utf-8")


def _model_card(
    trained: TrainingResult, pretrained: LocalModel, training: EmbedTrainingSettings, licence: str | None
) -> str:
    model = trained.model
    fields: dict[str, object] = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["maskfleet", "sentence-transformers"],
    }
    if licence:
        fields["license"] = licence_identifier(licence)
    figures = [f"| {name} | {100 * value:.2f} |" for name, value in sorted(trained.dev.items())]
    measured = ["## Measured on dev", "", "| | x 100 |", "|---|---|", *figures, ""] if figures else []
    settings = yaml.safe_dump(json.loads(training.model_dump_json()), sort_keys=False, allow_unicode=True)
    return "\n".join(
        [
            f"---\n{yaml.safe_dump(fields, sort_keys=True)}---",
            "",
            "# Sentence embeddings",
            "",
            f"Vectors of {model.get_embedding_dimension()} numbers for texts of up to {model.max_seq_length} tokens; "
            "compare them by their cosine.",
            "",
            "```python",
            "from sentence_transformers import SentenceTransformer",
            "",
            'model = SentenceTransformer("THIS_FOLDER")',
            'vectors = model.encode(["A sentence.", "Another one."])',
            "print(model.similarity(vectors, vectors))",
            "```",
            "",
            *_prompt_lines(model),
            "## Training",
            "",
            f"From {one_line(pretrained.name)} (SHA-256 {pretrained.digest[:12]}), {trained.rows:,} rows, "
            f"{trained.steps:,} steps, by `maskfleet embed train`.",
            "",
            *measured,
            "## Licence",
            "",
            one_line(licence) if licence else "Not stated by who exported the model.",
            "",
            f"## Settings\n\n```yaml\n{settings}```",
            "",
        ]
    )


def _prompt_lines(model: "SentenceTransformer") -> list[str]:
    found = [f"- `{name}`: `{one_line(text)}`" for name, text in sorted(model.prompts.items()) if text]
    return ["Prompts, chosen by `prompt_name`:", "", *found, ""] if found else []
