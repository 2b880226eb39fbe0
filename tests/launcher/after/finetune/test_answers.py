"""Answers and thresholds, against all possibilities tried one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from launcher.after.finetune.encode import ContextWindow, best_no_answer_threshold, find_answers

score = st.floats(-5, 5, width=32)


@given(st.lists(st.tuples(score, score), min_size=1, max_size=12), st.integers(1, 6))
def test_the_best_stretch_is_the_best_of_all(scores: list[tuple[float, float]], longest: int) -> None:
    pieces = len(scores) - 1
    characters = np.array([(3 * index, 3 * index + 2) for index in range(pieces)]).reshape(-1, 2)
    logits = np.array(scores, np.float32)
    (found,) = find_answers(1, [ContextWindow(0, 1, 0, characters)], logits[None], longest)
    totals = {
        (a, b): float(np.float64(logits[a + 1, 0]) + np.float64(logits[b + 1, 1]))
        for a in range(pieces)
        for b in range(a, min(pieces, a + longest))
    }
    if totals:
        assert found.margin == found.null - max(totals.values())
        assert totals[found.begin // 3, found.end // 3] == found.score
    else:
        assert found.margin == float("inf")


question = st.tuples(st.one_of(st.floats(-10, 10), st.just(float("inf"))), st.floats(0, 1), st.sampled_from([0.0, 1.0]))


@given(st.lists(question, min_size=1, max_size=20))
def test_the_threshold_is_as_good_as_any(questions: list[tuple[float, float, float]]) -> None:
    margins, found, none = (np.array(column) for column in zip(*questions, strict=True))
    found = np.where(np.isinf(margins), none, found)  # without a candidate there is nothing to find

    def total(threshold: float) -> float:
        return float(np.where(margins > threshold, none, found).sum())

    finite = margins[np.isfinite(margins)]
    possible = [total(-11.0), *(total(value) for value in finite)]
    threshold = best_no_answer_threshold(margins.tolist(), found.tolist(), none.tolist())
    assert np.isfinite(threshold)
    assert total(threshold) >= max(possible) - 1e-9
