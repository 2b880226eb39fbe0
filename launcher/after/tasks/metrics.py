"""Metrics of predictions: those of scikit-learn, scipy and seqeval; and exact match and F1 of answers, SQuAD's over
words (Rajpurkar et al. 2016, 2018) and CMRC 2018's over characters.

All lie in [0, 1], except correlations and Matthews' coefficient, which lie in [-1, 1]. Papers print them times 100.

A question's score is that of the accepted answer most like the prediction. If there is no accepted answer, only "" is
right. SQuAD 2.0's script, unlike that of 1.1, drops accepted answers that are empty after normalisation ("the"). Those
of 1.1 and of CMRC keep them: equal to such a prediction, they have exact match 1 and F1 0.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from launcher.after.tasks.examples import Examples, Questions, Retrieval, Sentences, Tagged
from launcher.after.tasks.schema import Description, Metric
from launcher.errors import EVALUATE, TaskError, optional

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)
_CMRC_PUNCTUATION = frozenset("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")  # noqa: RUF001 - the official script's
_CHINESE = re.compile(r"([\u4e00-\u9fa5])")
_WORDS = re.compile(
    r"""\.{2,}|[;@#$%&?!()\[\]{}<>"]|,(?!\d)|(?:[^\s;@#$%&?!()\[\]{}<>",.]|,(?=\d)|\.(?!\.|[\])}>"'\s]*$))+|\."""
)  # NLTK's words: a period ends one only at the end of a text, a comma only before what is no digit


def score_answers(
    metrics: Sequence[Metric], examples: Questions, predictions: Mapping[str, str], *, no_answer: bool
) -> dict[str, float]:
    """Return the metrics of answers: means over all questions, in [0, 1].

    exact_match and answer_f1 are SQuAD's metrics, cmrc_exact_match and cmrc_f1 are CMRC's.

    Args:
        predictions: predicted answer for each id; "" for no answer.
        no_answer: whether questions may have no answer, as in SQuAD 2.0.
    """
    scores: dict[str, float] = {}
    for metric in metrics:
        exact, chinese = metric.endswith("exact_match"), metric.startswith("cmrc")
        total = 0.0
        for name, accepted in zip(examples.ids, examples.answers, strict=True):
            texts = [answer.text for answer in accepted]
            if no_answer and not chinese:
                texts = [text for text in texts if words_of(text)]
            total += max(
                _similarity(text, predictions[name], exact=exact or not texts, chinese=chinese)
                for text in texts or [""]
            )
        scores[metric] = total / len(examples)
    return scores


def _similarity(accepted: str, predicted: str, *, exact: bool, chinese: bool) -> float:
    if chinese and exact:
        return float(plain_chinese(accepted) == plain_chinese(predicted))
    if chinese:
        right, given = pieces_of_chinese(accepted), pieces_of_chinese(predicted)
        return _overlap(longest_common(right, given), len(right), len(given))
    right, given = words_of(accepted), words_of(predicted)
    if exact:
        return float(right == given)
    return _overlap(sum((Counter(right) & Counter(given)).values()), len(right), len(given))


def _overlap(common: int, right: int, given: int) -> float:
    """Return the harmonic mean of precision and recall; 0 if nothing is common, be both texts empty."""
    return 2 * common / (right + given) if common else 0.0


def words_of(answer: str) -> list[str]:
    """Return the words of an answer in lower case, without ASCII punctuation and articles, as SQuAD compares them."""
    plain = "".join(character for character in answer.lower() if character not in _PUNCTUATION)
    return _ARTICLES.sub(" ", plain).split()


def pieces_of_chinese(answer: str) -> list[str]:
    """Return the pieces of an answer that CMRC compares for F1: each Chinese character and each other word, without
    punctuation.

    The official script splits words with NLTK; here they are split by the same rules without those for English
    contractions ("don't").
    """
    pieces: list[str] = []
    for stretch in _CHINESE.split(plain_chinese(answer)):
        pieces += [stretch] if _CHINESE.fullmatch(stretch) else _WORDS.findall(stretch)
    return pieces


def plain_chinese(answer: str) -> str:
    """Return an answer in lower case and without punctuation, as CMRC compares answers for exact match."""
    return "".join(character for character in answer.lower().strip() if character not in _CMRC_PUNCTUATION)


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest run of consecutive pieces that both sequences have."""
    longest = 0
    before = [0] * (len(second) + 1)
    for piece in first:
        ending = [0]
        for index, other in enumerate(second):
            ending.append(before[index] + 1 if piece == other else 0)
        longest, before = max(longest, *ending), ending
    return longest


Predictions = NDArray[np.int64] | NDArray[np.float64] | tuple[tuple[int, ...], ...] | Mapping[str, str]

_USE = "measuring a task"
_TWO_CLASSES: tuple[Metric, ...] = ("f1", "matthews")  # undefined for a split with a single class


def score(task: Description, examples: Examples, predictions: Predictions) -> dict[str, float]:
    """Return the task's metrics in the task's order; the first is the main metric.

    Args:
        task: kind, labels and metrics of the task.
        examples: N examples, as `Task.read` returns them.
        predictions: classification, pair_classification: [N] indices of labels. regression, similarity: [N] numbers.
            tagging: an index of a tag for each word. span: the answer to each question by its id, "" for no answer.

    Raises:
        TaskError: if predictions do not fit the examples or are not finite; if the split has a single class or score
            and the metric needs two; if the task is retrieval, which is measured with rankings.
        MissingPackage: if a library is not installed.
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
                remedy="measure rankings with an evaluator of sentence-transformers",
            )
    assert_never(examples)


def check_measurable(task: Description, examples: Examples, where: str = "the split") -> None:
    """Raise TaskError if all examples have the same label or score and a metric of the task is undefined then.

    `where`: name of the examples for the message.
    """
    if not isinstance(examples, Sentences) or len(np.unique(examples.labels)) > 1:
        return
    metric = next((metric for metric in task.metrics if not task.labels or metric in _TWO_CLASSES), None)
    if metric is not None:
        only = examples.labels[0]
        value = f"the label {task.labels[int(only)]!r}" if task.labels else f"the score {only:g}"
        raise TaskError(
            f"{task.name}: every example of {where} has {value}, but {metric} needs two different ones",
            remedy="measure a split with different labels or scores, or use another metric",
        )


def _classes(task: Description, examples: Sentences, predictions: Predictions) -> dict[str, float]:
    predicted, right = _array(task, predictions, len(examples)), examples.labels
    _check_indices(task, predicted)
    return {metric: _class_metric(metric, right, predicted) for metric in task.metrics}


def _class_metric(metric: Metric, right: NDArray[np.generic], predicted: NDArray[np.generic]) -> float:
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
    ):  # a correlation with a constant is undefined; such a model has learnt nothing
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
            remedy="predict as many tags as the sentence has words",
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
            scores[metric] = _class_metric(metric, right, predicted)
    return scores


def _answers(task: Description, examples: Questions, predictions: Predictions) -> dict[str, float]:
    if not isinstance(predictions, Mapping):
        raise TaskError(
            f"{task.name}: predictions are not answers by the id of the question",
            remedy="predict a text for each id",
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
        f"{task.name}: predictions are {shape}, not [{count}]", remedy="predict one value for each example"
    )
