"""Turns start and end scores of windows into answers, and finds the threshold above which a question counts as
unanswerable."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launcher.after.finetune.kind import Logits

_N_BEST = 20  # candidates of a window, and of a question


@dataclass(frozen=True)
class ContextWindow:
    """What a row shows of a context.

    Attributes:
        question: index of the example.
        first: position in the row of the context's first piece here.
        null: position of the class piece.
        characters: [pieces, 2] where in the context each piece begins and ends.
        best: [pieces] this window shows the piece with more context than others: answers that begin with it count.
    """

    question: int
    first: int
    null: int
    characters: NDArray[np.int64]
    best: NDArray[np.bool_]


@dataclass(frozen=True)
class Candidate:
    """A stretch of a context: characters `begin` to `end`, and its score, the sum of the two logits."""

    begin: int
    end: int
    score: float


@dataclass(frozen=True)
class Answered:
    """A question's candidates, best first, and the score of no answer: the least over its windows."""

    candidates: tuple[Candidate, ...]
    null: float

    @property
    def margin(self) -> float:
        """By how much the score of no answer exceeds the best candidate's."""
        return self.null - self.candidates[0].score if self.candidates else float("inf")


def find_answers(
    questions: int, windows: Sequence[ContextWindow], logits: Sequence[Logits], max_answer: int
) -> list[Answered]:
    """The candidates of each question, from [pieces, 2] scores of each window. Answers have at most `max_answer`
    pieces."""
    candidates: list[list[Candidate]] = [[] for _ in range(questions)]
    null = np.full(questions, np.inf)
    for window, scores in zip(windows, logits, strict=True):
        candidates[window.question] += _in_window(window, scores, max_answer)
        null[window.question] = min(null[window.question], float(scores[window.null].sum()))
    # Places break ties, so that the order of windows does not.
    ordered = (sorted(found, key=lambda one: (-one.score, one.begin, one.end)) for found in candidates)
    return [Answered(tuple(found[:_N_BEST]), float(none)) for found, none in zip(ordered, null, strict=True)]


def _in_window(window: ContextWindow, scores: Logits, max_answer: int) -> list[Candidate]:
    """The best stretches of all that begin in their best window; the first of equal ones."""
    inside = scores[window.first : window.first + len(window.characters)].astype(np.float64)
    begin, end = window.characters.T
    first, last = np.indices((len(inside), len(inside)), sparse=True)
    possible = (first <= last) & (last < first + max_answer) & window.best[:, None]
    possible &= begin[:, None] < end[None, :]
    a, b = np.nonzero(possible)
    values = inside[a, 0] + inside[b, 1]
    best = np.argsort(-values, kind="stable")[:_N_BEST]
    return [Candidate(int(begin[a[i]]), int(end[b[i]]), float(values[i])) for i in best.tolist()]


def texts(answered: Sequence[Answered], contexts: Sequence[str], threshold: float) -> list[str]:
    """The best candidate of each question; "" if no answer scores more than `threshold` above it."""
    return [
        ""
        if one.margin > threshold or not one.candidates
        else context[one.candidates[0].begin : one.candidates[0].end].strip()
        for one, context in zip(answered, contexts, strict=True)
    ]


def best_threshold(margins: Sequence[float], with_answer: Sequence[float], without: Sequence[float]) -> float:
    """The threshold under which the sum of the examples' scores is largest; of equal ones the least.

    Args:
        margins: of each question, by how much no answer is above its best candidate.
        with_answer, without: its score if the best candidate, or no answer, is given.
    """
    finite = np.isfinite(margins)  # a question without a candidate has no answer whatever the threshold
    if not finite.any():
        return 0.0
    apart = np.asarray(margins, np.float64)[finite]
    order = np.argsort(apart, kind="stable")
    sorted_margins = apart[order]
    gain = (np.asarray(with_answer, np.float64) - np.asarray(without, np.float64))[finite][order]
    totals = np.concatenate([[0.0], np.cumsum(gain)])
    # A cut lies between two different margins only: those below it are answered.
    cuts = np.concatenate([[True], sorted_margins[1:] > sorted_margins[:-1], [True]])
    best = int(np.argmax(np.where(cuts, totals, -np.inf)))
    # Midway between two margins, so that rounding does not move a question to the other side.
    if best == 0:
        return float(sorted_margins[0]) - 1.0
    if best == len(sorted_margins):
        return float(sorted_margins[-1]) + 1.0
    return float(sorted_margins[best - 1] + sorted_margins[best]) / 2
