"""Windows over long texts: each word has its label once, at its first token; a context's answer is where it is."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.after.finetune.encode import IGNORED_LABEL, EncodedQuestions, EncodedWords, ExampleEncoder
from launcher.after.finetune.model import open_tokenizer
from launcher.after.finetune.settings import FinetuneSettings, TaskMismatch
from launcher.after.tasks.examples import Answer, Questions, TaggedSentences
from tests.support.data.made_up import WORDS
from tests.support.tasks.small_tasks import Models, task

ANY = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
WORD = st.sampled_from([*WORDS, "ré", "日本", "a-b", "\x00", "\u200b", "x\x07y", "..."])


def encoder(models: Models, family: str, kind: str, folder: Path, length: int, **given: Any) -> ExampleEncoder:
    tokenizer = open_tokenizer(models(family).folder)
    chosen = FinetuneSettings(**{"stride": 8, "max_query": 8, **given})
    return ExampleEncoder(task(kind, folder, train=1, dev=1), tokenizer, chosen, length)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlnet", "deberta-v3"])
@ANY
@given(
    sentences=st.lists(st.lists(WORD, min_size=1, max_size=40), min_size=1, max_size=4),
    length=st.integers(14, 40),
)
def test_each_word_has_its_tag_once(
    models: Models, tmp_path: Path, family: str, sentences: list[list[str]], length: int
) -> None:
    asked = encoder(models, family, "tagging", tmp_path, length)
    tags = tuple(tuple(index % 3 for index in range(len(words))) for words in sentences)
    examples = TaggedSentences(tuple(map(tuple, sentences)), tags)
    found = asked.encode(examples)
    assert isinstance(found, EncodedWords)
    rows, labels = found.dataset["input_ids"], found.dataset["labels"]
    assert max(map(len, rows)) <= length
    places = np.concatenate(found.places)
    assert (places >= 0).all()
    assert len({tuple(place) for place in places.tolist()}) == len(places)
    assert sum(label != IGNORED_LABEL for row in labels for label in row) == len(places)
    # Outputs that say the labels themselves are the tags, padded as the Trainer pads.
    width = max(map(len, rows))
    outputs = np.full((len(rows), width, 3), IGNORED_LABEL, np.float32)
    for row, values in enumerate(labels):
        for at, label in enumerate(values):
            outputs[row, at] = np.eye(3)[label if label != IGNORED_LABEL else 0]
    assert found.compute_scores(outputs).metrics["accuracy"] == 1.0


@pytest.mark.parametrize("family", ["bert", "roberta", "xlnet", "deberta-v3"])
@ANY
@given(seed=st.integers(0, 1 << 30), length=st.integers(24, 60))
def test_the_answer_is_found_where_a_window_shows_it(
    models: Models, tmp_path: Path, family: str, seed: int, length: int
) -> None:
    asked, draw = encoder(models, family, "span", tmp_path, length), random.Random(seed)
    words = draw.choices(WORDS, k=draw.randint(5, 60))
    first = draw.randrange(len(words))
    text, start = words[first], len(" ".join([*words[:first], ""]))
    context = " ".join(words)
    examples = Questions(("a", "b"), ("the rank",) * 2, (context,) * 2, ((Answer(text, start),), ()))
    found = asked.encode(examples)
    assert isinstance(found, EncodedQuestions)
    begins, ends = found.dataset["start_positions"], found.dataset["end_positions"]
    shown = [
        context[window.characters[begin - window.first][0] : window.characters[end - window.first][1]]
        for window, begin, end in zip(found.windows, begins, ends, strict=True)
        if begin != window.null
    ]
    assert set(shown) == {text}
    assert all(begin == window.null for window, begin in zip(found.windows, begins, strict=True) if window.question)
    # Outputs that say the targets themselves are the answers.
    width = max(map(len, found.dataset["input_ids"]))
    logits = np.zeros((2, len(found.windows), width), np.float32)
    logits[0, np.arange(len(begins)), begins] = 1
    logits[1, np.arange(len(ends)), ends] = 1
    scores = found.compute_scores((logits[0], logits[1]))
    assert scores.metrics == {"answer_f1": 1.0, "exact_match": 1.0}


def test_a_question_that_leaves_no_room_is_refused(models: Models, tmp_path: Path) -> None:
    asked = encoder(models, "bert", "span", tmp_path, 16, max_query=12)
    with pytest.raises(TaskMismatch, match="max_query"):
        asked.encode(Questions(("a",), ("the rank",), ("rank",), ((),)))
