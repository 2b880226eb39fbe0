"""Makes sentence-transformers' losses from the settings."""

from typing import TYPE_CHECKING, Any, assert_never

from encoder_core.errors import ModelError
from launcher.after.embed.model import library
from launcher.after.embed.rows import TextColumns
from launcher.after.embed.settings import (
    Angle,
    Cosent,
    Cosine,
    EmbedTraining,
    Loss,
    MultipleNegatives,
    Softmax,
    Triplet,
)
from launcher.errors import TaskError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import nn


def make_loss(model: "SentenceTransformer", training: EmbedTraining, train: TextColumns) -> "nn.Module":
    """The module that the trainer calls with a batch's columns and labels. What it draws, it draws from torch's seed.

    Raises ModelError: a Matryoshka length is longer than the model's vectors.
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
    """Raises TaskError: the rows are not what `loss` compares, or what vectors can be measured by."""
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
            return _multiple_negatives(losses, model, loss)
        case Cosent():
            return losses.CoSENTLoss(model, scale=loss.scale)
        case Angle():
            return losses.AnglELoss(model, scale=loss.scale)
        case _:
            assert_never(loss)


def _multiple_negatives(losses: Any, model: "SentenceTransformer", loss: MultipleNegatives) -> Any:
    directions = ("query_to_doc", "doc_to_query") if loss.symmetric else ("query_to_doc",)
    mode = "per_direction" if loss.symmetric else "joint"
    shared = {"scale": loss.scale, "directions": directions, "partition_mode": mode}
    if loss.mini_batch is None:
        return losses.MultipleNegativesRankingLoss(model, **shared)
    return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=loss.mini_batch, **shared)
