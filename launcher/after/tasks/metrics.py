"""Metrics of predictions: scikit-learn's, scipy's and seqeval's, and SQuAD's own (`answers.py`).

All lie in [0, 1], except correlations and Matthews' coefficient, which lie in [-1, 1]. Papers print them times 100.
"""

from collections.abc import Mapping
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from launcher.after.tasks.answers import score_answers
from launcher.after.tasks.examples import Examples, Questions, Retrieval, Sentences, Tagged
from launcher.after.tasks.schema import Description, Metric
from launcher.errors import TaskError
from launcher.extras import EVALUATE, optional

Predictions = NDArray[np.int64] | NDArray[np.float64] | tuple[tuple[int, ...], ...] | Mapping[str, str]

_USE = "measuring a task"
_TWO_CLASSES: tuple[Metric, ...] = ("f1", "matthews")  # say nothing of a split with one class only


def score(task: Description, examples: Examples, predictions: Predictions) -> dict[str, float]:
    """The task's metrics in its order; the first is its main one.

    Args:
        task: its kind, labels and metrics.
        examples: N of them, as `Task.read` gives them.
        predictions: classification, pair_classification: [N] indices of labels. regression, similarity: [N] numbers.
            tagging: indices of tags, as many as words. span: the answer to each question by its id, "" for none.

    Raises:
        TaskError: predictions that do not fit the examples or are not finite; a split with one class or one score only,
            where the metric needs two; retrieval, which is measured with rankings.
        MissingPackage: a library that is not installed.
    """
    check_measurable(task, examples)
    match examples:
        case Sentences() if task.labels:
            return _classes(task, examples, predictions)
        case Sentences():
            return _numbers(task, examples, predictions)
        case Tagged():
            return _tags(task, examples, predictions)
        case Questions():
            return _answers(task, examples, predictions)
        case Retrieval():
            raise TaskError(
                f"{task.name}: retrieval is measured with rankings, not with predictions",
                remedy="give rankings to an evaluator of sentence-transformers",
            )
    assert_never(examples)


def check_measurable(task: Description, examples: Examples, where: str = "the split") -> None:
    """Raises TaskError: all examples have one label or one score, and a metric of the task says nothing then.

    `where` the examples are, for the message.
    """
    if not isinstance(examples, Sentences) or len(np.unique(examples.labels)) > 1:
        return
    metric = next((metric for metric in task.metrics if not task.labels or metric in _TWO_CLASSES), None)
    if metric is not None:
        only = examples.labels[0]
        value = f"the label {task.labels[int(only)]!r}" if task.labels else f"the score {only:g}"
        raise TaskError(
            f"{task.name}: every example of {where} has {value}, and {metric} needs two",
            remedy="measure a split that has both, or with another metric",
        )


def _classes(task: Description, examples: Sentences, predictions: Predictions) -> dict[str, float]:
    predicted, right = _array(task, predictions, len(examples)), examples.labels
    _check_indices(task, predicted)
    return {metric: _class_metric(metric, right, predicted, len(task.labels)) for metric in task.metrics}


def _class_metric(
    metric: Metric, right: NDArray[np.generic], predicted: NDArray[np.generic], labels: int
) -> float:
    sklearn = optional("sklearn.metrics", _USE, EVALUATE)
    match metric:
        case "accuracy":
            return float(np.mean(right == predicted))
        case "f1":
            return float(sklearn.f1_score(right, predicted, pos_label=1, zero_division=0.0))
        case "macro_f1":
            return float(sklearn.f1_score(right, predicted, average="macro", zero_division=0.0))
        case "matthews":
            return float(sklearn.matthews_corrcoef(right, predicted))
    raise AssertionError(f"{metric} is refused with the task")


def _numbers(task: Description, examples: Sentences, predictions: Predictions) -> dict[str, float]:
    predicted, right = _array(task, predictions, len(examples)).astype(np.float64), examples.labels
    if not np.isfinite(predicted).all():
        raise TaskError(
            f"{task.name}: {np.count_nonzero(~np.isfinite(predicted))} of {len(predicted)} predictions are not finite",
            remedy="the model has diverged: lower the learning rate",
        )
    if (
        len(np.unique(predicted)) < 2
    ):  # a correlation with a constant is not defined; such a model knows nothing
        return dict.fromkeys(task.metrics, 0.0)
    stats = optional("scipy.stats", _USE, EVALUATE)
    functions = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
    return {metric: float(functions[metric](right, predicted).statistic) for metric in task.metrics}


def _tags(task: Description, examples: Tagged, predictions: Predictions) -> dict[str, float]:
    if not isinstance(predictions, tuple) or [len(tags) for tags in predictions] != [
        len(tags) for tags in examples.tags
    ]:
        raise TaskError(
            f"{task.name}: predictions are not a tag for each word of each sentence",
            remedy="predict as many tags as there are words",
        )
    right = np.array([tag for tags in examples.tags for tag in tags])
    predicted = np.array([tag for tags in predictions for tag in tags])
    _check_indices(task, predicted)
    scores: dict[str, float] = {}
    for metric in task.metrics:
        if metric == "entity_f1":
            seqeval = optional("seqeval.metrics", _USE, EVALUATE)
            named = [
                [[task.labels[tag] for tag in tags] for tags in all_] for all_ in (examples.tags, predictions)
            ]
            scores[metric] = float(seqeval.f1_score(*named, zero_division=0))
        else:
            scores[metric] = _class_metric(metric, right, predicted, len(task.labels))
    return scores


def _answers(task: Description, examples: Questions, predictions: Predictions) -> dict[str, float]:
    if not isinstance(predictions, Mapping):
        raise TaskError(
            f"{task.name}: predictions are not answers by question", remedy="predict a text for each id"
        )
    if missing := [name for name in examples.ids if name not in predictions]:
        raise TaskError(
            f"{task.name}: {len(missing)} questions have no prediction, {missing[0]!r} among them",
            remedy='predict "" where the context has no answer',
        )
    return score_answers(task.metrics, examples, predictions, no_answer=task.no_answer)


def _check_indices(task: Description, predicted: NDArray[np.generic]) -> None:
    if not np.isin(predicted, np.arange(len(task.labels))).all():
        raise TaskError(
            f"{task.name}: predictions are not all indices of its {len(task.labels)} labels",
            remedy="predict an index into the task's labels",
        )


def _array(task: Description, predictions: Predictions, count: int) -> NDArray[np.generic]:
    if isinstance(predictions, np.ndarray) and predictions.shape == (count,):
        return predictions
    shape = predictions.shape if isinstance(predictions, np.ndarray) else type(predictions).__name__
    raise TaskError(
        f"{task.name}: predictions are {shape}, not [{count}]", remedy="predict one value an example"
    )
