"""Metrics of predictions, computed by scikit-learn, scipy and seqeval; and exact match and F1 of answers, over words as
in SQuAD (Rajpurkar et al. 2016, 2018), or over characters as in CMRC 2018.

All lie in [0, 1], except correlations and Matthews' coefficient, which lie in [-1, 1]. Papers print them times 100.

A question's score is the best that the prediction gets with any accepted answer. If there is none, only "" is right.
SQuAD 2.0's script drops accepted answers that are empty after normalisation ("the"). The scripts of SQuAD 1.1 and CMRC
keep them, and a prediction that is also empty gets exact match 1 and F1 0.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from launcher.after.tasks.examples import Examples, Questions, Sentences, TaggedSentences
from launcher.after.tasks.schema import MetricName, TaskDescription
from launcher.errors import EVALUATE_EXTRA, TaskError, import_optional

_ARTICLE_PATTERN = re.compile(r"\b(a|an|the)\b")  # dropped from answers, as SQuAD's script does
_PUNCTUATION = frozenset(string.punctuation)  # dropped from answers, as SQuAD's script does
_CMRC_PUNCTUATION = frozenset("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")  # noqa: RUF001 - the official script's
_CHINESE_CHARACTER = re.compile(r"([\u4e00-\u9fa5])")
# NLTK's word rules: the text's final period is split off, and a comma unless a digit follows.
_WORD_PATTERN = re.compile(
    r"""\.{2,}|[;@#$%&?!()\[\]{}<>"]|,(?!\d)|(?:[^\s;@#$%&?!()\[\]{}<>",.]|,(?=\d)|\.(?!\.|[\])}>"'\s]*$))+|\."""
)


def _answer_score(accepted: str, predicted: str, *, exact: bool, chinese: bool) -> float:
    """Return exact match or F1 of a predicted and an accepted answer, as CMRC (`chinese`) or SQuAD defines it."""
    if chinese and exact:
        return float(normalise_cmrc_answer(accepted) == normalise_cmrc_answer(predicted))
    if chinese:
        right, given = chinese_f1_pieces(accepted), chinese_f1_pieces(predicted)
        common = SequenceMatcher(None, right, given, autojunk=False).find_longest_match().size
        return _overlap_f1(common, len(right), len(given))
    right, given = squad_words(accepted), squad_words(predicted)
    if exact:
        return float(right == given)
    return _overlap_f1(sum((Counter(right) & Counter(given)).values()), len(right), len(given))


def _overlap_f1(common_count: int, accepted_count: int, predicted_count: int) -> float:
    """Return the harmonic mean of precision and recall; 0 if nothing is common, even if both texts are empty."""
    return 2 * common_count / (accepted_count + predicted_count) if common_count else 0.0


def squad_words(answer: str) -> list[str]:
    """Return the words of an answer in lower case, without ASCII punctuation and articles, as SQuAD compares them."""
    plain = "".join(character for character in answer.lower() if character not in _PUNCTUATION)
    return _ARTICLE_PATTERN.sub(" ", plain).split()


def chinese_f1_pieces(answer: str) -> list[str]:
    """Return the pieces of an answer that CMRC compares for F1: each Chinese character and each other word, without
    punctuation.

    The official script splits words with NLTK. Here they are split by NLTK's rules, except the rules for English
    contractions ("don't").
    """
    pieces: list[str] = []
    for stretch in _CHINESE_CHARACTER.split(normalise_cmrc_answer(answer)):
        pieces += [stretch] if _CHINESE_CHARACTER.fullmatch(stretch) else _WORD_PATTERN.findall(stretch)
    return pieces


def normalise_cmrc_answer(answer: str) -> str:
    """Return an answer in lower case and without punctuation, as CMRC compares answers for exact match."""
    return "".join(character for character in answer.lower().strip() if character not in _CMRC_PUNCTUATION)


# Predictions for all examples of a split; `compute_metrics` says which form each kind of task has.
Predictions = NDArray[np.int64] | NDArray[np.float64] | tuple[tuple[int, ...], ...] | Mapping[str, str]

_IMPORT_PURPOSE = "measuring a task"  # what needs a package, for the message if it is not installed
_TWO_CLASS_METRICS: tuple[MetricName, ...] = ("f1", "matthews")  # undefined if all examples have the same class


def compute_metrics(task: TaskDescription, examples: Examples, predictions: Predictions) -> dict[str, float]:
    """Return the task's metrics in the task's order; the first is the main metric.

    Args:
        task: the task, of any kind but retrieval, which is measured with rankings.
        examples: N examples, as `Task.read` returns them.
        predictions: classification, pair_classification: [N] indices of labels. regression, similarity: [N] finite
            numbers. tagging: an index of a tag for each word. span: the answer to each question by its id, "" for no
            answer.

    Raises:
        TaskError: if the split has a single class or score and the metric needs two.
        MissingPackage: if a library is not installed.
    """
    check_metrics_defined(task, examples)
    match examples, predictions:
        case Questions(), Mapping():
            return {metric: _answer_metric(metric, task, examples, predictions) for metric in task.metrics}
        case TaggedSentences(), tuple():
            return {metric: _tag_metric(metric, task, examples.tags, predictions) for metric in task.metrics}
        case Sentences(), np.ndarray():
            return {metric: _compute_metric(metric, examples.labels, predictions) for metric in task.metrics}
    raise AssertionError(f"{type(predictions).__name__} cannot be the predictions of a task of {task.kind}")


def check_metrics_defined(task: TaskDescription, examples: Examples, where: str = "the split") -> None:
    """Raise TaskError if all examples have the same label or score and a metric of the task is undefined then.

    `where`: name of the examples for the message.
    """
    if not isinstance(examples, Sentences) or len(np.unique(examples.labels)) > 1:
        return
    metric = next((metric for metric in task.metrics if not task.labels or metric in _TWO_CLASS_METRICS), None)
    if metric is not None:
        only = examples.labels[0]
        value = f"the label {task.labels[int(only)]!r}" if task.labels else f"the score {only:g}"
        raise TaskError(
            f"{task.name}: every example of {where} has {value}, but {metric} needs two different ones",
            remedy="measure a split with different labels or scores, or use another metric",
        )


def _compute_metric(metric: MetricName, gold: NDArray[np.generic], predicted: NDArray[np.generic]) -> float:
    sklearn = import_optional("sklearn.metrics", _IMPORT_PURPOSE, EVALUATE_EXTRA)
    match metric:
        case "accuracy":
            return float(sklearn.accuracy_score(gold, predicted))
        case "f1":
            return float(sklearn.f1_score(gold, predicted, pos_label=1, zero_division=0.0))
        case "macro_f1":
            return float(sklearn.f1_score(gold, predicted, average="macro", zero_division=0.0))
        case "matthews":
            return float(sklearn.matthews_corrcoef(gold, predicted))
        case "pearson" | "spearman":
            if len(np.unique(predicted)) < 2:  # the correlation is undefined, but such a model has learnt nothing
                return 0.0
            function = getattr(import_optional("scipy.stats", _IMPORT_PURPOSE, EVALUATE_EXTRA), f"{metric}r")
            return float(function(gold, predicted).statistic)
    raise AssertionError(f"task_issues rejects {metric} for these kinds of tasks")


TagSequences = tuple[tuple[int, ...], ...]  # the index of a tag for each word of each sentence


def _tag_metric(metric: MetricName, task: TaskDescription, gold: TagSequences, predicted: TagSequences) -> float:
    if metric != "entity_f1":
        return _compute_metric(
            metric, *(np.array([tag for tags in side for tag in tags]) for side in (gold, predicted))
        )
    named = [[[task.labels[tag] for tag in tags] for tags in side] for side in (gold, predicted)]
    return float(import_optional("seqeval.metrics", _IMPORT_PURPOSE, EVALUATE_EXTRA).f1_score(*named, zero_division=0))


def _answer_metric(
    metric: MetricName, task: TaskDescription, examples: Questions, predictions: Mapping[str, str]
) -> float:
    """Return SQuAD's exact_match or answer_f1, or CMRC's cmrc_exact_match or cmrc_f1: the mean over all questions."""
    exact, chinese, total = metric.endswith("exact_match"), metric.startswith("cmrc"), 0.0
    for name, accepted in zip(examples.ids, examples.answers, strict=True):
        texts = [answer.text for answer in accepted]
        if task.no_answer and not chinese:
            texts = [text for text in texts if squad_words(text)]
        total += max(
            _answer_score(text, predictions[name], exact=exact or not texts, chinese=chinese) for text in texts or [""]
        )
    return total / len(examples)
