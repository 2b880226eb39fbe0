"""Answers to questions: from the scores of windows to a text, or to "no answer" (Devlin et al. 2019, 4.2 and 4.3).

The class token stands for "no answer": its score competes with the best span of all windows, and the threshold above
which a question counts as unanswerable is found on dev.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ContextWindow:
    """The part of a context in one row.

    Attributes:
        question: index of the example.
        first: position in the row of the window's first context token.
        null: position in the row of the class token.
        characters: [tokens, 2] characters of the context at which each token begins and ends.
    """

    question: int
    first: int
    null: int
    characters: NDArray[np.int64]


@dataclass(frozen=True)
class BestAnswer:
    """The best span of a question's context, as characters, and its `score`, the sum of two logits. `null`: score of
    "no answer", the least over its windows."""

    begin: int = 0
    end: int = 0
    score: float = -np.inf
    null: float = np.inf

    @property
    def margin(self) -> float:
        """Score of "no answer" minus the score of the best span; infinite without a span."""
        return self.null - self.score


def find_answers(
    questions: int, windows: Sequence[ContextWindow], logits: NDArray[np.float32], max_answer: int
) -> list[BestAnswer]:
    """Return the best answer to each question; of equal spans the first.

    Args:
        logits: scores of each window's tokens as the first and the last one, [windows, tokens, 2].
        max_answer: largest number of tokens of an answer.
    """
    found = [BestAnswer() for _ in range(questions)]
    for window, scores in zip(windows, logits, strict=True):
        before, best = found[window.question], _best_span(window, scores, max_answer)
        null = min(before.null, float(scores[window.null].sum()))
        kept = best if best.score > before.score else before
        found[window.question] = BestAnswer(kept.begin, kept.end, kept.score, null)
    return found


def _best_span(window: ContextWindow, scores: NDArray[np.float32], max_answer: int) -> BestAnswer:
    inside = scores[window.first : window.first + len(window.characters)].astype(np.float64)
    if not len(inside):
        return BestAnswer()
    begin, end = window.characters.T
    first, last = np.indices((len(inside), len(inside)), sparse=True)
    possible = (first <= last) & (last < first + max_answer) & (begin[:, None] < end[None, :])
    values = np.where(possible, inside[:, :1] + inside[:, 1], -np.inf)
    a, b = divmod(int(values.argmax()), len(inside))
    return BestAnswer(int(begin[a]), int(end[b]), float(values[a, b]))


def answer_texts(answered: Sequence[BestAnswer], contexts: Sequence[str], threshold: float) -> list[str]:
    """Return the text of each question's best span; "" if the margin of "no answer" exceeds `threshold`."""
    return [
        "" if one.margin > threshold else context[one.begin : one.end].strip()
        for one, context in zip(answered, contexts, strict=True)
    ]


def best_threshold(margins: Sequence[float], with_answer: Sequence[float], without: Sequence[float]) -> float:
    """Return the threshold with the largest sum of the questions' scores; of equal ones, the smallest.

    Args:
        margins: margin of "no answer" for each question (`Answered.margin`).
        with_answer, without: metric of each question if its best span, or "no answer", is predicted.
    """
    finite = np.isfinite(margins)  # a question without a span is unanswered at every threshold
    if not finite.any():
        return 0.0
    apart = np.asarray(margins, np.float64)[finite]
    order = np.argsort(apart, kind="stable")
    ascending = apart[order]
    gain = (np.asarray(with_answer, np.float64) - np.asarray(without, np.float64))[finite][order]
    totals = np.concatenate([[0.0], np.cumsum(gain)])
    # A cut lies only between two different margins. Questions with margins below it are answered.
    cuts = np.concatenate([[True], ascending[1:] > ascending[:-1], [True]])
    best = int(np.argmax(np.where(cuts, totals, -np.inf)))
    # Midway between two margins, so that rounding does not move a question to the other side.
    sides = np.concatenate([[ascending[0] - 2.0], ascending, [ascending[-1] + 2.0]])
    return float(sides[best] + sides[best + 1]) / 2
