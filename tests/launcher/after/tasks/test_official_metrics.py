"""Every metric of every kind of task against the library that papers use, on random predictions: the usual ones, and
those with ties, with empty examples, and with classes that are missing. `-s` prints the table."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.stats
import seqeval.metrics
import sklearn.metrics

from launcher.after.tasks.examples import Answer, Questions, Sentences, TaggedSentences
from launcher.after.tasks.metrics import compute_metrics
from launcher.after.tasks.schema import METRICS, Kind, Metric
from launcher.after.tasks.task import Task, load_task

CASES = 150  # for each metric
CLASSES, PAIRS, NUMBERS, TAGS = (load_task(name) for name in ("trec", "mrpc", "stsb", "conll2003"))
Case = tuple[float, float, str]  # ours, theirs, and what is special about it
Draw = np.random.Generator

SKLEARN: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": lambda right, given: sklearn.metrics.f1_score(right, given, zero_division=0.0),
    "macro_f1": lambda right, given: sklearn.metrics.f1_score(
        right, given, average="macro", zero_division=0.0
    ),
    "matthews": sklearn.metrics.matthews_corrcoef,
}


def measured(task: Task, metric: Metric, examples: Any, predictions: Any) -> float:
    return compute_metrics(task.model_copy(update={"metrics": [metric]}), examples, predictions)[metric]


def classes(metric: Metric, draw: Draw) -> Case:
    """Of several classes, all but one are missing now and then, from the right labels (`accuracy`, `macro_f1`) or the
    predictions."""
    task = PAIRS if metric == "f1" else CLASSES
    count, most = int(draw.integers(1, 30)), len(task.labels)
    right, given = (draw.integers(0, draw.integers(1, most + 1), count) for _ in range(2))
    if metric in ("f1", "matthews"):
        right = np.concatenate([[0, 1], right])  # the metric is refused for one class
        given = np.concatenate([draw.integers(0, 2, 2), given])
    found = measured(task, metric, Sentences(("x",) * len(right), None, right), given)
    missing = len(np.unique(given)) < len(np.unique(right))
    return found, SKLEARN[metric](right, given), "missing" if missing else "usual"


def numbers(metric: Metric, draw: Draw) -> Case:
    count, steps = int(draw.integers(3, 40)), int(draw.integers(1, 12))
    right = np.concatenate([[0.0, 5.0], draw.integers(0, 6, count)]).astype(float)
    given = draw.integers(0, steps, count + 2) / steps if draw.random() < 0.7 else draw.normal(size=count + 2)
    found = measured(NUMBERS, metric, Sentences(("x",) * len(right), ("y",) * len(right), right), given)
    function = scipy.stats.pearsonr if metric == "pearson" else scipy.stats.spearmanr
    if len(np.unique(given)) == 1:  # theirs is NaN: such a model has learnt nothing
        return found, 0.0, "empty"
    theirs = float(function(right, given).statistic)
    return found, theirs, "tied" if len(np.unique(given)) < len(given) else "usual"


def tags(metric: Metric, draw: Draw) -> Case:
    """Any tags in any order, so that entities begin with I-; sentences without entities; words of no sentence."""
    most = int(draw.choice([1, 3, len(TAGS.labels)]))
    lengths = [*draw.integers(0, 8, draw.integers(1, 6)).tolist(), 1]
    right, given = (
        tuple(tuple(draw.integers(0, most, length).tolist()) for length in lengths) for _ in range(2)
    )
    examples = TaggedSentences(tuple(("w",) * length for length in lengths), right)
    found = measured(TAGS, metric, examples, given)
    if metric == "entity_f1":
        named = [[[TAGS.labels[tag] for tag in one] for one in side] for side in (right, given)]
        theirs = float(seqeval.metrics.f1_score(*named, zero_division=0))
    else:
        theirs = SKLEARN[metric](np.concatenate(right), np.concatenate(given))
    return found, theirs, "empty" if most == 1 or 0 in lengths else "usual"


ENGLISH = ["the", "a", "...", "Cat", "cat.", "Paris", ""]
CHINESE = ["花", "呗", "1963", "nba", "。", "《", " ", ""]


def answers(metric: Metric, draw: Draw) -> Case:
    """SQuAD 1.1 and CMRC, whose scripts are said plainly in test_metrics.py; here their mean over questions."""
    from tests.launcher.after.tasks.test_metrics import cmrc, official

    chinese = metric.startswith("cmrc")
    task = load_task("cmrc2018" if chinese else str(draw.choice(["squad", "squad2"])))
    some = CHINESE if chinese else ENGLISH

    def text() -> str:
        return ("" if chinese else " ").join(draw.choice(some, draw.integers(0, 4)))

    least = 0 if task.no_answer else 1
    golds = [
        tuple(text() for _ in range(draw.integers(least, 3 + least))) for _ in range(draw.integers(1, 5))
    ]
    given = [text() for _ in golds]
    names = tuple(map(str, range(len(golds))))
    examples = Questions(names, names, names, tuple(tuple(Answer(one, 0) for one in each) for each in golds))
    found = measured(task, metric, examples, dict(zip(names, given, strict=True)))
    pairs = [
        cmrc(gold, one) if chinese else official(gold, one, second=task.no_answer)
        for gold, one in zip(golds, given, strict=True)
    ]
    theirs = float(np.mean([pair["f1" in metric] for pair in pairs]))
    empty = not all(given) or not all(all(gold) for gold in golds)
    return found, theirs, "missing" if () in golds else "empty" if empty else "usual"


DRAWN: dict[Kind, Callable[[Metric, Draw], Case]] = {
    "classification": classes,
    "pair_classification": classes,
    "regression": numbers,
    "similarity": numbers,
    "tagging": tags,
    "span": answers,
}


def every() -> Iterator[tuple[Kind, Metric]]:
    """Every metric of every kind; those of retrieval are held to pytrec_eval in tests/launcher/after/embed."""
    for kind in DRAWN:
        yield from ((kind, metric) for metric in METRICS[kind])


def test_no_kind_is_left_out() -> None:
    assert DRAWN.keys() | {"retrieval"} == METRICS.keys()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of scikit-learn and seqeval, about what is missing
@pytest.mark.parametrize(("kind", "metric"), list(every()))
def test_each_metric_is_the_official_one(kind: Kind, metric: Metric) -> None:
    draw = np.random.default_rng([*f"{kind} {metric}".encode()])
    drawn = [DRAWN[kind](metric, draw) for _ in range(CASES)]
    for ours, theirs, _ in drawn:
        assert ours == pytest.approx(theirs, abs=1e-9)
    seen = Counter(special for *_, special in drawn)
    print(f"| {kind} | {metric} | {CASES} | {', '.join(f'{n} {what}' for what, n in sorted(seen.items()))} |")
    assert len(seen) > 1, "not only usual cases"
