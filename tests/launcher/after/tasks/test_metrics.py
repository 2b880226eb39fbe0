"""Every metric of every kind of task against the library or the script that papers use, on random predictions: usual
ones, and those with ties, with empty examples, and with missing classes. What cannot be measured is refused."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import seqeval.metrics
import sklearn.metrics

from launcher.after.tasks.examples import Answer, Questions, Sentences, TaggedSentences
from launcher.after.tasks.metrics import compute_metrics, squad_words
from launcher.after.tasks.schema import METRICS_BY_KIND, MetricName, TaskKind
from launcher.after.tasks.task import Task, load_task
from launcher.errors import MissingPackage, TaskError

CASES = 80  # for each metric
CLASSES, PAIRS, NUMBERS, TAGS = (load_task(name) for name in ("trec", "mrpc", "stsb", "conll2003"))
SQUAD, CMRC = (load_task(name) for name in ("squad2", "cmrc2018"))
Case = tuple[float, float, str]  # ours, theirs, and what is special about it
Draw = np.random.Generator

SKLEARN: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": lambda right, given: sklearn.metrics.f1_score(right, given, zero_division=0.0),
    "macro_f1": lambda right, given: sklearn.metrics.f1_score(right, given, average="macro", zero_division=0.0),
    "matthews": sklearn.metrics.matthews_corrcoef,
}


def measured(task: Task, metric: MetricName, examples: Any, predictions: Any) -> float:
    return compute_metrics(task.model_copy(update={"metrics": [metric]}), examples, predictions)[metric]


def classes(metric: MetricName, draw: Draw) -> Case:
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


def numbers(metric: MetricName, draw: Draw) -> Case:
    count, steps = int(draw.integers(3, 40)), int(draw.integers(1, 12))
    right = np.concatenate([[0.0, 5.0], draw.integers(0, 6, count)]).astype(float)
    given = draw.integers(0, steps, count + 2) / steps if draw.random() < 0.7 else draw.normal(size=count + 2)
    found = measured(NUMBERS, metric, Sentences(("x",) * len(right), ("y",) * len(right), right), given)
    function = scipy.stats.pearsonr if metric == "pearson" else scipy.stats.spearmanr
    if len(np.unique(given)) == 1:  # theirs is NaN: such a model has learnt nothing
        return found, 0.0, "empty"
    theirs = float(function(right, given).statistic)
    return found, theirs, "tied" if len(np.unique(given)) < len(given) else "usual"


def tags(metric: MetricName, draw: Draw) -> Case:
    """Any tags in any order, so that entities begin with I-; sentences without entities; words of no sentence."""
    most = int(draw.choice([1, 3, len(TAGS.labels)]))
    lengths = [*draw.integers(0, 8, draw.integers(1, 6)).tolist(), 1]
    right, given = (tuple(tuple(draw.integers(0, most, length).tolist()) for length in lengths) for _ in range(2))
    examples = TaggedSentences(tuple(("w",) * length for length in lengths), right)
    found = measured(TAGS, metric, examples, given)
    if metric == "entity_f1":
        named = [[[TAGS.labels[tag] for tag in one] for one in side] for side in (right, given)]
        theirs = float(seqeval.metrics.f1_score(*named, zero_division=0))
    else:
        theirs = SKLEARN[metric](np.concatenate(right), np.concatenate(given))
    return found, theirs, "empty" if most == 1 or 0 in lengths else "usual"


def overlap(common: int, right: int, given: int) -> float:
    """2pr / (p + r); without anything common 0, as in all three scripts."""
    if not common:
        return 0.0
    precision, recall = common / given, common / right
    return 2 * precision * recall / (precision + recall)


def squad_script(golds: tuple[str, ...], predicted: str, *, second: bool) -> tuple[float, float]:
    """The best exact match and F1 over the golds. In SQuAD 1.1 two texts of which nothing is left are equal and have no
    word in common; 2.0 drops golds of which nothing is left, and if a text is empty, F1 is whether both are."""
    given, exact, f1 = squad_words(predicted), 0.0, 0.0
    kept = [gold for gold in golds if squad_words(gold)] if second else golds
    for right in map(squad_words, kept or ("",)):
        common = sum((Counter(right) & Counter(given)).values())
        exact = max(exact, float(right == given))
        whole = second and not (right and given)
        f1 = max(f1, float(right == given) if whole else overlap(common, len(right), len(given)))
    return exact, f1


CMRC_SIGNS = "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"  # noqa: RUF001 - the script's


def cmrc_script(golds: tuple[str, ...], predicted: str) -> tuple[float, float]:
    """CMRC 2018's: signs are dropped; characters and words of the longest stretch that both have."""

    def plain(text: str) -> str:
        return "".join(sign for sign in text.lower().strip() if sign not in CMRC_SIGNS)

    def pieces(text: str) -> list[str]:
        spaced = "".join(f" {sign} " if "一" <= sign <= "龥" else sign for sign in plain(text))
        return spaced.split()

    exact, best = 0.0, 0.0
    for gold in golds:
        right, given = pieces(gold), pieces(predicted)
        stretches = {tuple(right[a:b]) for a in range(len(right)) for b in range(a + 1, len(right) + 1)}
        theirs = {tuple(given[a:b]) for a in range(len(given)) for b in range(a + 1, len(given) + 1)}
        common = max((len(stretch) for stretch in stretches & theirs), default=0)
        exact = max(exact, float(plain(gold) == plain(predicted)))
        best = max(best, overlap(common, len(right), len(given)))
    return exact, best


ENGLISH = ["the", "a", "...", "an!", "Cat", "cat.", "Paris", "the cat", ""]
CHINESE = ["花", "呗", "提", "1963", "nba", "3.5", "4k", " ", "。", "《", "-", "……", ""]


def questions(golds: list[tuple[str, ...]]) -> Questions:
    names = tuple(map(str, range(len(golds))))
    answers = tuple(tuple(Answer(text, 0) for text in accepted) for accepted in golds)
    return Questions(names, names, names, answers)


def answers(metric: MetricName, draw: Draw) -> Case:
    """The mean over questions of SQuAD 1.1, SQuAD 2.0 and CMRC."""
    chinese = metric.startswith("cmrc")
    task = CMRC if chinese else load_task(str(draw.choice(["squad", "squad2"])))

    def text() -> str:
        words = draw.choice(CHINESE if chinese else ENGLISH, draw.integers(0, 4))
        return ("" if chinese else " ").join(words)

    least = 0 if task.no_answer else 1
    golds = [tuple(text() for _ in range(draw.integers(least, 3 + least))) for _ in range(draw.integers(1, 5))]
    given = [text() for _ in golds]
    found = measured(task, metric, questions(golds), {str(place): one for place, one in enumerate(given)})
    pairs = [
        cmrc_script(gold, one) if chinese else squad_script(gold, one, second=task.no_answer)
        for gold, one in zip(golds, given, strict=True)
    ]
    theirs = float(np.mean([pair["f1" in metric] for pair in pairs]))
    empty = not all(given) or not all(all(gold) for gold in golds)
    return found, theirs, "missing" if () in golds else "empty" if empty else "usual"


DRAWN: dict[TaskKind, Callable[[MetricName, Draw], Case]] = {
    "classification": classes,
    "pair_classification": classes,
    "regression": numbers,
    "similarity": numbers,
    "tagging": tags,
    "span": answers,
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of scikit-learn and seqeval, about what is missing
@pytest.mark.parametrize(
    "kind", [kind for kind in METRICS_BY_KIND if kind != "retrieval"]
)  # which after/embed measures
def test_each_metric_is_the_official_one(kind: TaskKind) -> None:
    for metric in METRICS_BY_KIND[kind]:
        draw = np.random.default_rng([*f"{kind} {metric}".encode()])
        drawn = [DRAWN[kind](metric, draw) for _ in range(CASES)]
        for ours, theirs, _ in drawn:
            assert ours == pytest.approx(theirs, abs=1e-9), metric
        assert len({special for *_, special in drawn}) > 1, "not only usual cases"


@pytest.mark.parametrize(
    ("task", "accepted", "predicted", "exact", "f1"),
    [
        (
            SQUAD,
            ("the Eiffel Tower",),
            "Eiffel tower.",
            1.0,
            1.0,
        ),  # articles, case and punctuation are nothing
        (SQUAD, ("Paris", "in Paris, France"), "Paris France", 0.0, 0.8),  # the most similar of the accepted
        (SQUAD, ("one one two",), "one", 0.0, 0.5),
        (SQUAD, (), "the", 1.0, 1.0),  # nothing is left of it, as in the official script
        (SQUAD, ("don't",), "dont", 1.0, 1.0),
        (CMRC, ("《花呗》",), "花呗", 1.0, 1.0),  # punctuation is nothing
        (CMRC, ("花呗提额",), "花呗额", 0.0, 2 * 2 / 7),  # the longest common run, not the bag
        (CMRC, ("1963年",), "在1963年", 0.0, 2 * 2 / 5),  # a number is one piece
        (CMRC, ("4k 3.5%",), "4K 3.5", 0.0, 2 * 2 / 5),  # "4k" is a word, "%" another, as NLTK splits them
        (CMRC, ("u.s. 10,000, (a).",), "U.S. 10,000", 0.0, 2 * 2 / 9),
    ],
)
def test_answers_are_compared_as_the_scripts_do(
    task: Task, accepted: tuple[str, ...], predicted: str, exact: float, f1: float
) -> None:
    found = compute_metrics(task, questions([accepted]), {"0": predicted})
    assert sorted(found.values()) == pytest.approx(sorted((exact, f1)))


ONES = np.ones(3, np.int64)


@pytest.mark.parametrize(
    ("task", "examples", "predictions", "problem"),
    [
        (
            load_task("cola"),
            ONES,
            ONES,
            "every example of the split has the label '1', but matthews needs two",
        ),
        (PAIRS, ONES, ONES, "but f1 needs two"),
        (NUMBERS, ONES * 2.5, ONES * 0.5, "has the score 2.5, but spearman needs two"),
    ],
)
def test_what_cannot_be_measured(task: Task, examples: Any, predictions: Any, problem: str) -> None:
    with pytest.raises(TaskError, match=problem):
        compute_metrics(task, Sentences(("x",) * 3, None, examples), predictions)


def test_accuracy_needs_no_second_class() -> None:
    examples = Sentences(("x",) * 3, None, ONES)
    assert compute_metrics(load_task("mnli"), examples, ONES) == {"accuracy": 1.0}


def test_a_library_that_is_not_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(MissingPackage, match=r"\bmaskfleet\[evaluate\]"):
        compute_metrics(PAIRS, Sentences(("x",) * 2, None, np.array([0, 1])), np.array([0, 1]))
