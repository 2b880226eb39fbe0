"""The linear probe finds what is linearly there, layer by layer, and nothing where there is nothing."""

import random
from dataclasses import replace

import numpy as np
import pytest

from launcher.after.diagnose.measures import ProbeSplits, measure_linear_probe, subsample
from launcher.after.diagnose.states import FrozenEncoder, open_frozen_encoder
from launcher.after.tasks.examples import Sentences
from launcher.errors import RunError
from launcher.runtime.run.evaluations import Figure, select_measure
from tests.support.data.made_up import WORDS
from tests.support.tasks.small_tasks import Models

OTHERS = [word for word in WORDS if word != "machine"]


def sentences(draw: random.Random, count: int, *, told: bool) -> Sentences:
    """A sentence's class is whether a certain word is in it, or drawn anew if not `told`."""
    texts, labels = [], []
    for _ in range(count):
        label = draw.randint(0, 1)
        words = draw.choices(OTHERS, k=6) + ["machine"] * label
        draw.shuffle(words)
        texts.append(" ".join(words))
        labels.append(label if told else draw.randint(0, 1))
    return Sentences(tuple(texts), None, np.array(labels))


def splits(*, told: bool, seed: int = 5) -> ProbeSplits:
    draw = random.Random(seed)
    return ProbeSplits(*(sentences(draw, count, told=told) for count in (240, 80, 160)))


@pytest.fixture(scope="module", params=["bert", "xlnet"])
def frozen(request: pytest.FixtureRequest, models: Models) -> FrozenEncoder:
    return open_frozen_encoder(str(models(request.param).folder))


def value(figures: list[Figure], measure: str, layer: int | None = None) -> float:
    (found,) = (figure.value for figure in select_measure(figures, measure) if figure.layer == layer)
    assert found is not None
    return found


@pytest.mark.long
def test_a_word_is_found_and_noise_is_not(frozen: FrozenEncoder) -> None:
    found, noise = (measure_linear_probe(frozen, splits(told=told)) for told in (True, False))
    assert [figure.layer for figure in select_measure(found, "accuracy")] == [None, 0, 1, 2]
    assert value(found, "accuracy") > 0.85
    assert value(found, "best_accuracy") > 0.85
    assert value(found, "best_accuracy") == value(found, "accuracy", int(value(found, "best_layer")))
    assert 0.3 < value(noise, "accuracy") < 0.7


@pytest.mark.long
def test_two_texts_are_told_apart_by_what_differs(frozen: FrozenEncoder) -> None:
    """Whether both texts are the same."""
    draw = random.Random(1)

    def pairs(count: int) -> Sentences:
        single = sentences(draw, count, told=True)
        other = [
            text if number % 2 else " ".join(draw.choices(OTHERS, k=6)) for number, text in enumerate(single.first)
        ]
        return Sentences(single.first, tuple(other), np.arange(count) % 2)

    found = measure_linear_probe(frozen, ProbeSplits(pairs(120), pairs(40), pairs(80)))
    assert value(found, "accuracy") > 0.85


def test_splits_that_cannot_be_are_refused(frozen: FrozenEncoder) -> None:
    good = splits(told=True)
    with pytest.raises(RunError, match=r"\bdev\b.*\bempty\b"):
        measure_linear_probe(frozen, replace(good, dev=Sentences((), None, np.zeros(0, dtype=np.int64))))
    with pytest.raises(RunError, match=r"\blabel\b"):
        measure_linear_probe(frozen, replace(good, train=replace(good.train, labels=good.train.labels * 0)))


def test_a_sample_of_examples_is_the_same_every_time() -> None:
    examples = sentences(random.Random(2), 50, told=True)
    once, again = subsample(examples, 20), subsample(examples, 20)
    assert once.first == again.first
    assert len(once) == 20
    order = [examples.first.index(text) for text in once.first]
    assert order == sorted(order)
    assert [once.labels[0], once.labels[-1]] == [examples.labels[order[0]], examples.labels[order[-1]]]
    assert subsample(examples, 50) is examples
