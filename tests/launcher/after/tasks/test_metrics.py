"""Metrics against their definitions, written out here, on random predictions; what cannot be measured is refused."""

import math
from collections import Counter
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from launcher.after.tasks.examples import Answer, Questions, Sentences, TaggedSentences
from launcher.after.tasks.metrics import compute_metrics, normalised_words
from launcher.after.tasks.task import Task, load_task
from launcher.errors import MissingPackage, TaskError

COLA, MRPC, STSB, MNLI = (load_task(name) for name in ("cola", "mrpc", "stsb", "mnli"))
CONLL, SQUAD, CMRC = (load_task(name) for name in ("conll2003", "squad2", "cmrc2018"))


def sentences(labels: NDArray[Any]) -> Sentences:
    return Sentences(tuple("x" for _ in labels), None, labels)


def labelled(task: Task, *metrics: str) -> Task:
    return task.model_copy(update={"metrics": list(metrics)})


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=40))
def test_scores_of_two_classes_are_those_of_the_four_counts(pairs: list[tuple[int, int]]) -> None:
    right, given_ = (np.array(side) for side in zip(*pairs, strict=True))
    if len(set(right.tolist())) < 2:
        return
    tp, fp, fn, tn = (int(((given_ == g) & (right == r)).sum()) for g, r in ((1, 1), (1, 0), (0, 1), (0, 0)))
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    expected = {
        "matthews": (tp * tn - fp * fn) / below if below else 0.0,
        "accuracy": (tp + tn) / len(pairs),
        "f1": 2 * tp / (2 * tp + fp + fn),
        "macro_f1": np.mean([2 * tp / (2 * tp + fp + fn), 2 * tn / (2 * tn + fp + fn)]),
    }
    found = compute_metrics(labelled(COLA, *expected), sentences(right), given_)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=3, max_size=40))
def test_correlations_are_numpys_and_zero_where_all_is_the_same(pairs: list[tuple[int, int]]) -> None:
    right, given_ = (np.array(side, np.float64) for side in zip(*pairs, strict=True))
    if len(set(right.tolist())) < 2:
        return
    found = compute_metrics(STSB, sentences(right), given_)
    if len(set(given_.tolist())) < 2:  # a model that says the same of every pair
        assert found == {"spearman": 0.0, "pearson": 0.0}
        return
    ranks = [np.array([np.mean(np.flatnonzero(np.sort(s) == v)) for v in s]) for s in (right, given_)]
    expected = {
        "spearman": np.corrcoef(ranks[0], ranks[1])[0, 1],
        "pearson": np.corrcoef(right, given_)[0, 1],
    }
    assert found == pytest.approx(expected, abs=1e-9)


def entities(tags: list[str]) -> set[tuple[str, int, int]]:
    """(type, first, last) of valid BIO tags."""
    found: list[tuple[str, int, int]] = []
    for position, tag in enumerate(tags):
        if tag.startswith("B-"):
            found.append((tag[2:], position, position))
        elif tag.startswith("I-"):
            kind, first, _ = found.pop()
            found.append((kind, first, position))
    return set(found)


def random_bio(random: np.random.Generator, length: int) -> list[str]:
    tags: list[str] = []
    for _ in range(length):
        kinds = ["O", "B-PER", "B-LOC", *([f"I-{tags[-1][2:]}"] * 2 if tags and tags[-1] != "O" else [])]
        tags.append(str(random.choice(kinds)))
    return tags


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_entity_f1_counts_whole_entities(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 12, 6)
    right, given_ = ([random_bio(random, int(length)) for length in lengths] for _ in range(2))
    correct = sum(len(entities(r) & entities(g)) for r, g in zip(right, given_, strict=True))
    total = sum(len(entities(tags)) for tags in (*right, *given_))
    index = [[[CONLL.labels.index(tag) for tag in tags] for tags in side] for side in (right, given_)]
    as_tuples = [tuple(tuple(tags) for tags in side) for side in index]
    examples = TaggedSentences(tuple(tuple("w" * len(tags)) for tags in right), as_tuples[0])
    expected = 2 * correct / total if total else 0.0
    assert compute_metrics(CONLL, examples, as_tuples[1])["entity_f1"] == pytest.approx(expected)
    words = sum(map(len, right))
    same = sum(r == g for rs, gs in zip(right, given_, strict=True) for r, g in zip(rs, gs, strict=True))
    assert compute_metrics(labelled(CONLL, "accuracy"), examples, as_tuples[1])["accuracy"] == pytest.approx(
        same / words
    )


def questions(*accepted: tuple[str, ...]) -> Questions:
    names = tuple(str(number) for number in range(len(accepted)))
    answers = tuple(tuple(Answer(text, 0) for text in texts) for texts in accepted)
    return Questions(names, names, names, answers)


@pytest.mark.parametrize(
    ("accepted", "predicted", "exact", "f1"),
    [
        (("the Eiffel Tower",), "Eiffel tower.", 1.0, 1.0),  # articles, case and punctuation are nothing
        (("Paris", "in Paris, France"), "Paris France", 0.0, 0.8),  # the most similar of the accepted
        (("a b c",), "c d", 0.0, 0.5),  # "a" is an article
        (("one one two",), "one", 0.0, 0.5),
        (("Paris",), "", 0.0, 0.0),
        ((), "", 1.0, 1.0),
        ((), "Paris", 0.0, 0.0),
        ((), "the", 1.0, 1.0),  # nothing is left of it, as in the official script
        (("don't",), "dont", 1.0, 1.0),
        (("the", "cat"), "a", 0.0, 0.0),  # nothing is left of "the", so it is no answer
        (("the", "..."), "", 1.0, 1.0),  # and of these two, none is
    ],
)
def test_answers_are_compared_as_squad_does(
    accepted: tuple[str, ...], predicted: str, exact: float, f1: float
) -> None:
    found = compute_metrics(SQUAD, questions(accepted), {"0": predicted})
    assert found == pytest.approx({"answer_f1": f1, "exact_match": exact})


def overlap(common: int, right: int, given_: int) -> float:
    """2pr / (p + r); without anything common 0, as in all three scripts."""
    if not common:
        return 0.0
    precision, recall = common / given_, common / right
    return 2 * precision * recall / (precision + recall)


def squad_1(gold: str, predicted: str) -> tuple[float, float]:
    """SQuAD 1.1's script: two texts of which nothing is left are equal, and have no word in common."""
    right, given_ = normalised_words(gold), normalised_words(predicted)
    common = sum((Counter(right) & Counter(given_)).values())
    return float(right == given_), overlap(common, len(right), len(given_))


def squad_2(gold: str, predicted: str) -> tuple[float, float]:
    """SQuAD 2.0's: if one of them is empty, F1 is whether both are."""
    exact, f1 = squad_1(gold, predicted)
    return exact, f1 if normalised_words(gold) and normalised_words(predicted) else exact


def official(golds: tuple[str, ...], predicted: str, *, second: bool) -> tuple[float, float]:
    """The best of each figure over the golds; 2.0 drops those that normalise to nothing."""
    kept = [gold for gold in golds if normalised_words(gold)] if second else list(golds)
    scores = [(squad_2 if second else squad_1)(gold, predicted) for gold in kept or [""]]
    return max(exact for exact, _ in scores), max(f1 for _, f1 in scores)


CMRC_SIGNS = "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"  # noqa: RUF001 - the script's


def cmrc(golds: tuple[str, ...], predicted: str) -> tuple[float, float]:
    """CMRC 2018's script: signs are dropped; characters and words of the longest stretch that both have."""

    def plain(text: str) -> str:
        return "".join(sign for sign in text.lower().strip() if sign not in CMRC_SIGNS)

    def pieces(text: str) -> list[str]:
        spaced = "".join(f" {sign} " if "一" <= sign <= "龥" else sign for sign in plain(text))
        return spaced.split()

    exact, best = 0.0, 0.0
    for gold in golds:
        right, given_ = pieces(gold), pieces(predicted)
        stretches = {tuple(right[a:b]) for a in range(len(right)) for b in range(a + 1, len(right) + 1)}
        theirs = {tuple(given_[a:b]) for a in range(len(given_)) for b in range(a + 1, len(given_) + 1)}
        common = max((len(stretch) for stretch in stretches & theirs), default=0)
        exact = max(exact, float(plain(gold) == plain(predicted)))
        best = max(best, overlap(common, len(right), len(given_)))
    return exact, best


TEXTS = st.lists(st.sampled_from(["the", "a", "...", "an!", "cat", "Paris", "the cat", ""]), max_size=3).map(
    " ".join
)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=4).map(tuple), TEXTS, st.booleans())
def test_both_of_squads_scripts(golds: tuple[str, ...], predicted: str, second: bool) -> None:
    task = SQUAD if second else load_task("squad")
    golds = golds if second else golds or ("",)  # each question of 1.1 has an answer
    found = compute_metrics(task, questions(golds), {"0": predicted})
    assert (found["exact_match"], found["answer_f1"]) == pytest.approx(
        official(golds, predicted, second=second)
    )


CHINESE = st.lists(
    st.sampled_from(["花", "呗", "提", "1963", "nba", "3.5", "4k", " ", "。", "《", "-", "……", "年"]),
    max_size=6,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(CHINESE, min_size=1, max_size=3).map(tuple), CHINESE)
def test_cmrcs_script(golds: tuple[str, ...], predicted: str) -> None:
    found = compute_metrics(CMRC, questions(golds), {"0": predicted})
    assert (found["cmrc_exact_match"], found["cmrc_f1"]) == pytest.approx(cmrc(golds, predicted))


@pytest.mark.parametrize("name", ["squad", "cmrc2018"])
def test_nothing_against_nothing_is_equal_and_has_nothing_in_common(name: str) -> None:
    gold, predicted = ("the", "A!") if name == "squad" else ("。", "《》")
    assert [*compute_metrics(load_task(name), questions((gold,)), {"0": predicted}).values()] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("accepted", "predicted", "exact", "f1"),
    [
        (("1963年",), "1963年", 1.0, 1.0),
        (("《花呗》",), "花呗", 1.0, 1.0),  # punctuation is nothing
        (("花呗提额",), "花呗额", 0.0, 2 * 2 / 7),  # the longest common run, not the bag
        (("1963年",), "在1963年", 0.0, 2 * 2 / 5),  # a number is one piece
        (("NBA 球队",), "nba球", 0.0, 2 * 2 / 5),
        (("4k 3.5%",), "4K 3.5", 0.0, 2 * 2 / 5),  # "4k" is a word, "%" another, as NLTK splits them
        (("u.s. 10,000, (a).",), "U.S. 10,000", 0.0, 2 * 2 / 9),
        (("花",), "草", 0.0, 0.0),
    ],
)
def test_chinese_answers_are_compared_as_cmrc_does(
    accepted: tuple[str, ...], predicted: str, exact: float, f1: float
) -> None:
    found = compute_metrics(CMRC, questions(accepted), {"0": predicted})
    assert found == pytest.approx({"cmrc_f1": f1, "cmrc_exact_match": exact})


WORDS = st.lists(st.sampled_from(["red", "blue", "green", "sky"]), max_size=5)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=6))
def test_answers_f1_is_the_mean_overlap_of_words(pairs: list[tuple[list[str], list[str]]]) -> None:
    expected = []
    for right, given_ in pairs:
        common = sum((Counter(right) & Counter(given_)).values())
        if not right or not given_:
            expected.append(float(right == given_))
        elif not common:
            expected.append(0.0)
        else:
            precision, recall = common / len(given_), common / len(right)
            expected.append(2 * precision * recall / (precision + recall))
    examples = questions(*((" ".join(right),) if right else () for right, _ in pairs))
    predicted = {str(number): " ".join(given_) for number, (_, given_) in enumerate(pairs)}
    assert compute_metrics(SQUAD, examples, predicted)["answer_f1"] == pytest.approx(np.mean(expected))


ONES = np.ones(3, np.int64)


@pytest.mark.parametrize(
    ("task", "examples", "predictions", "problem"),
    [
        (COLA, sentences(ONES), ONES, "every example of the split has the label '1', but matthews needs two"),
        (MRPC, sentences(ONES), ONES, "but f1 needs two"),
        (STSB, sentences(ONES * 2.5), ONES * 0.5, "has the score 2.5, but spearman needs two"),
    ],
)
def test_what_cannot_be_measured(task: Task, examples: Any, predictions: Any, problem: str) -> None:
    with pytest.raises(TaskError, match=problem):
        compute_metrics(task, examples, predictions)


def test_accuracy_needs_no_second_class() -> None:
    assert compute_metrics(MNLI, sentences(ONES), ONES) == {"accuracy": 1.0}


def test_a_library_that_is_not_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        if name.startswith("sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="sklearn")
        return import_module(name)

    monkeypatch.setattr("launcher.errors.import_module", absent)
    with pytest.raises(MissingPackage) as caught:
        compute_metrics(COLA, sentences(np.array([0, 1])), np.array([0, 1]))
    assert caught.value.remedy == "pip install 'maskfleet[evaluate]'"
