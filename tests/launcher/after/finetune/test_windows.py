"""Windows over long texts: words with labels, contexts with answers. Any text, any length."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel

from launcher.after.finetune.inputs import (
    IGNORED,
    Pieces,
    best_window,
    most_tokens,
    open_pieces,
    window_ranges,
)
from launcher.after.finetune.network import open_config
from launcher.after.finetune.settings import TaskMismatch
from launcher.after.finetune.spans import SpanKind, find_answers, texts
from launcher.after.finetune.tagging import TaggingKind
from launcher.after.tasks.examples import Answer, Questions, Tagged
from tests.support.data.made_up import WORDS
from tests.support.tasks.small_tasks import model

FAMILIES = ("bert", "roberta", "xlnet")
# Words of the tokenizers, and anything: other scripts, control characters, marks, spaces of all sorts.
words = st.lists(
    st.one_of(
        st.sampled_from(WORDS), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
    ),
    min_size=1,
    max_size=40,
)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pieces]:
    found = {}
    for family in FAMILIES:
        folder = model(family, tmp_path_factory.mktemp(family) / "model").folder
        found[family] = open_pieces(folder, open_config(folder), 32)
    return found


@given(st.integers(0, 400), st.integers(1, 60), st.integers(0, 80))
def test_windows_cover_everything_and_overlap(count: int, room: int, stride: int) -> None:
    ranges = window_ranges(count, room, stride)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == count
    assert all(0 < end - begin <= room for begin, end in ranges) or count == 0
    shared = [before[1] - after[0] for before, after in pairwise(ranges)]
    assert all(overlap == min(stride, room // 2) for overlap in shared)
    best = best_window(count, ranges)
    for index in range(count):
        context = [min(index - b, e - 1 - index) if b <= index < e else -1 for b, e in ranges]
        assert context[best[index]] == max(context)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None)
@example(["\x1f0", "a", "a"], 0)  # a character that is dropped moves what `tokenizers` says of the others
@given(words, st.integers(0, 12))
def test_each_word_has_its_label_once_at_its_first_piece(
    pieces: dict[str, Pieces], family: str, text: list[str], stride: int
) -> None:
    chosen = pieces[family]
    kind = TaggingKind(chosen, ("O", "X", "Y"), stride)
    tags = tuple(index % 3 for index in range(len(text)))
    prepared = kind.prepare(Tagged((tuple(text),), (tags,)))
    place = prepared.places[0]
    assert len(place) == len(text)
    assert len({tuple(one) for one in place.tolist()}) == len(text)
    assert all(len(row) <= chosen.max_length for row in prepared.rows)
    labelled = [
        (index, int(at))
        for index, row in enumerate(prepared.rows)
        for at in np.flatnonzero(row.target != IGNORED)
    ]
    assert sorted(labelled) == sorted(tuple(one) for one in place.tolist())
    assert [int(prepared.rows[row].target[at]) for row, at in place] == list(tags)
    logits = [np.full((len(row), 3), -1.0, np.float32) for row in prepared.rows]
    for (row, at), tag in zip(place, tags, strict=True):
        logits[row][at, tag] = 1.0
    assert kind.predictions(prepared, logits) == (tags,)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=60), st.integers(0, 12), st.data())
def test_an_answer_is_found_where_it_was_put(
    pieces: dict[str, Pieces], family: str, text: list[str], stride: int, data: st.DataObject
) -> None:
    """With logits that point at the target of a row, the answer is the target's text."""
    chosen = pieces[family]
    context = " ".join(text)
    first = data.draw(st.integers(0, len(text) - 1))
    last = data.draw(st.integers(first, min(len(text) - 1, first + 1)))
    answer = Answer(" ".join(text[first : last + 1]), len(" ".join([*text[:first], ""])))
    kind = SpanKind(chosen, stride, max_query=4)
    questions = Questions(("q",), ("the rank",), (context,), ((answer,),))
    prepared = kind.prepare(questions)
    assert all(len(row) <= chosen.max_length for row in prepared.rows)
    shown = np.zeros(len(context), bool)
    logits = []
    for row, window in zip(prepared.rows, prepared.windows, strict=True):
        for begin, end in window.characters:
            shown[begin:end] = True
        scores = np.zeros((len(row), 2), np.float32)
        if tuple(row.target) != (window.null, window.null):
            scores[row.target[0], 0] = scores[row.target[1], 1] = 5.0
        logits.append(scores)
    assert shown[[index for index, character in enumerate(context) if character != " "]].all()
    whole = any(scores.max() > 0 for scores in logits)
    answered = find_answers(1, prepared.windows, logits, 30)
    # The first piece may count in another window than one that has the answer whole; then no stretch has both.
    best = texts(answered, [context], float("inf"))[0]
    if whole and answered[0].candidates[0].score == 10.0:
        assert best == answer.text
    if len(prepared.rows) == 1:
        assert whole
        assert best == answer.text


def test_a_long_question_is_cut_and_one_without_room_is_refused(pieces: dict[str, Pieces]) -> None:
    long = Questions(("q",), (" ".join(WORDS),), (" ".join(WORDS),), ((),))
    rows = SpanKind(pieces["bert"], 4, max_query=6).prepare(long).rows
    assert all(row.ids.tolist().index(pieces["bert"].tokenizer.sep_token_id) == 7 for row in rows)
    with pytest.raises(TaskMismatch, match=r"max_length \d+\b.*\d+ tokens\b"):
        SpanKind(pieces["bert"], 4, max_query=60).prepare(long)


@pytest.mark.parametrize("pad", [0, 1, 3])
@pytest.mark.parametrize(
    "kind",
    [
        "albert",
        "bert",
        "camembert",
        "data2vec-text",
        "distilbert",
        "electra",
        "ibert",
        "longformer",
        "luke",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ],
)
def test_a_row_of_the_longest_length_is_read_and_a_longer_one_is_not(kind: str, pad: int) -> None:
    """By transformers' own classes, wherever their first position lies."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    if kind == "distilbert":
        sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
    if kind == "luke":
        sizes |= {"entity_vocab_size": 4, "entity_emb_size": 4}
    if kind == "longformer":
        sizes |= {"attention_window": 4}
    if kind == "mpnet":
        pad = 1  # its class knows no other
    config = AutoConfig.for_model(
        kind, **sizes, vocab_size=30, max_position_embeddings=20, pad_token_id=pad, type_vocab_size=1
    )
    model = AutoModel.from_config(config).eval()
    if kind == "xmod":
        model.set_default_language("en_XX")
    most = most_tokens(SimpleNamespace(model_max_length=10**30), config)
    assert most is not None
    model(input_ids=torch.full((1, most), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 7))
