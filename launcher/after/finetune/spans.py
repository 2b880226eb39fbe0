"""The task kind span: the part of a context that answers a question, or "no answer" (Devlin et al. 2019, 4.2 and 4.3).

A context that is too long for the model is cut into windows, each after the question. The class piece stands for "no
answer": in training, it is the target of a window without the answer; in prediction, its score competes with the best
span of all windows. The threshold above which a question counts as unanswerable is found on dev.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from launcher.after.finetune.inputs import (
    Head,
    InputRow,
    Logits,
    Pieces,
    Prepared,
    best_window,
    window_ranges,
)
from launcher.after.finetune.settings import TaskMismatch
from launcher.after.tasks.examples import Answer, Questions

_N_BEST = 20  # number of candidates of a window, and of a question


@dataclass(frozen=True)
class ContextWindow:
    """The part of a context in one row.

    Attributes:
        question: index of the example.
        first: position in the row of the window's first context piece.
        null: position in the row of the class piece.
        characters: [pieces, 2] characters of the context at which each piece begins and ends.
        best: [pieces] whether this window shows more context of the piece than other windows: only answers that begin
            with such a piece count.
    """

    question: int
    first: int
    null: int
    characters: NDArray[np.int64]
    best: NDArray[np.bool_]


@dataclass(frozen=True)
class Candidate:
    """A possible answer: characters `begin` to `end` of the context, and its score, the sum of the two logits."""

    begin: int
    end: int
    score: float


@dataclass(frozen=True)
class Answered:
    """The candidates for a question, best first, and the score of "no answer", the least over its windows (`null`)."""

    candidates: tuple[Candidate, ...]
    null: float

    @property
    def margin(self) -> float:
        """Score of "no answer" minus the score of the best candidate; infinite without candidates."""
        return self.null - self.candidates[0].score if self.candidates else float("inf")


def find_answers(
    questions: int, windows: Sequence[ContextWindow], logits: Sequence[Logits], max_answer: int
) -> list[Answered]:
    """Return the candidates of each question. `logits`: scores of each window, [pieces, 2]. `max_answer`: largest
    number of pieces of an answer."""
    candidates: list[list[Candidate]] = [[] for _ in range(questions)]
    null = np.full(questions, np.inf)
    for window, scores in zip(windows, logits, strict=True):
        candidates[window.question] += _in_window(window, scores, max_answer)
        null[window.question] = min(null[window.question], float(scores[window.null].sum()))
    # Positions break ties, so that the order of windows does not matter.
    ordered = (sorted(found, key=lambda one: (-one.score, one.begin, one.end)) for found in candidates)
    return [Answered(tuple(found[:_N_BEST]), float(none)) for found, none in zip(ordered, null, strict=True)]


def _in_window(window: ContextWindow, scores: Logits, max_answer: int) -> list[Candidate]:
    """Return the best candidates among those whose first piece has its best window here; of equal ones, the first."""
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
    """Return the text of the best candidate of each question; "" if the margin of "no answer" exceeds `threshold`."""
    return [
        ""
        if one.margin > threshold or not one.candidates
        else context[one.candidates[0].begin : one.candidates[0].end].strip()
        for one, context in zip(answered, contexts, strict=True)
    ]


def best_threshold(margins: Sequence[float], with_answer: Sequence[float], without: Sequence[float]) -> float:
    """Return the threshold with the largest sum of the questions' scores; of equal ones, the smallest.

    Args:
        margins: margin of "no answer" for each question (`Answered.margin`).
        with_answer, without: metric of each question if its best candidate, or "no answer", is predicted.
    """
    finite = np.isfinite(margins)  # a question without a candidate is unanswered at every threshold
    if not finite.any():
        return 0.0
    apart = np.asarray(margins, np.float64)[finite]
    order = np.argsort(apart, kind="stable")
    sorted_margins = apart[order]
    gain = (np.asarray(with_answer, np.float64) - np.asarray(without, np.float64))[finite][order]
    totals = np.concatenate([[0.0], np.cumsum(gain)])
    # A cut lies only between two different margins. Questions with margins below it are answered.
    cuts = np.concatenate([[True], sorted_margins[1:] > sorted_margins[:-1], [True]])
    best = int(np.argmax(np.where(cuts, totals, -np.inf)))
    # Midway between two margins, so that rounding does not move a question to the other side.
    if best == 0:
        return float(sorted_margins[0]) - 1.0
    if best == len(sorted_margins):
        return float(sorted_margins[-1]) + 1.0
    return float(sorted_margins[best - 1] + sorted_margins[best]) / 2


_LEAST_CONTEXT = 8  # smallest number of context pieces in a window


@dataclass(frozen=True)
class PreparedQuestions(Prepared):
    """Questions as rows.

    Attributes:
        windows: the context window of each row.
    """

    windows: tuple[ContextWindow, ...]


@dataclass(frozen=True)
class _Pair:
    """A question and a whole context as pieces.

    Attributes:
        ids, types: [T] ids and token types of all pieces.
        context: indices of the context's pieces, which are consecutive.
        characters: [pieces of the context, 2] characters of the context at which each piece begins and ends.
        null: index of the class piece.
    """

    ids: NDArray[np.int64]
    types: NDArray[np.int64]
    context: NDArray[np.int64]
    characters: NDArray[np.int64]
    null: int


@dataclass(frozen=True)
class SpanKind:
    """The kind of task in which a span of the context answers a question.

    Attributes:
        pieces: the tokenizer.
        stride: number of pieces that two windows of a context share.
        max_query: number of pieces after which a question is cut.
    """

    pieces: Pieces
    stride: int
    max_query: int

    head: Head = "QuestionAnswering"
    outputs: int = 2

    def prepare(self, examples: Questions) -> PreparedQuestions:
        """Return the rows of all windows. Raises TaskMismatch if an answer is outside its context, or a question leaves
        no room for a context."""
        rows: list[InputRow] = []
        windows: list[ContextWindow] = []
        for index, context in enumerate(examples.contexts):
            answers = examples.answers[index]
            if any(not 0 <= one.start <= one.start + len(one.text) <= len(context) for one in answers):
                raise TaskMismatch(
                    f"question {examples.ids[index]} has an answer outside its context",
                    remedy="correct its answer_start",
                )
            pair = self._encode(examples.questions[index], context)
            more, seen = self._windows(pair, index, answers[0] if answers else None)
            rows += more
            windows += seen
        return PreparedQuestions(rows, tuple(windows))

    def _windows(
        self, pair: _Pair, index: int, answer: Answer | None
    ) -> tuple[list[InputRow], list[ContextWindow]]:
        around = len(pair.ids) - len(pair.context)
        room = self.pieces.max_length - around
        if room < min(_LEAST_CONTEXT, len(pair.context)):
            raise TaskMismatch(
                f"max_length {self.pieces.max_length} leaves room for {max(room, 0)} tokens of a context",
                remedy="raise max_length, or lower max_query",
            )
        ranges = window_ranges(len(pair.context), room, self.stride)
        best = best_window(len(pair.context), ranges)
        first = int(pair.context[0]) if len(pair.context) else 0
        rows, windows = [], []
        for number, (begin, end) in enumerate(ranges):
            kept = np.r_[:first, pair.context[begin:end], first + len(pair.context) : len(pair.ids)]
            null = int(np.flatnonzero(kept == pair.null)[0])
            characters = pair.characters[begin:end]
            target = _target(characters, answer, first, null)
            rows.append(InputRow(pair.ids[kept], pair.types[kept] if self.pieces.types else None, target))
            windows.append(ContextWindow(index, first, null, characters, best[begin:end] == number))
        return rows, windows

    def _encode(self, question: str, context: str) -> _Pair:
        encoded = self.pieces.tokenizer(
            self._short(question.strip()), context, return_offsets_mapping=True, verbose=False
        )
        ids = np.array(encoded["input_ids"], np.int64)
        types = np.array(encoded.get("token_type_ids") or np.zeros_like(ids), np.int64)
        inside = np.flatnonzero([part == 1 for part in encoded.sequence_ids()])
        offsets = np.array(encoded["offset_mapping"], np.int64)[inside]
        special = [part is None for part in encoded.sequence_ids()]
        null = int(np.flatnonzero((ids == self.pieces.tokenizer.cls_token_id) & special)[0])
        return _Pair(ids, types, inside, _without_spaces(offsets, context), null)

    def _short(self, question: str) -> str:
        """Return the text of the question's first `max_query` pieces."""
        encoded: Any = self.pieces.tokenizer(
            question, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        offsets = encoded["offset_mapping"]
        return question if len(offsets) <= self.max_query else question[: offsets[self.max_query - 1][1]]

    def targets(self, rows: Sequence[InputRow], width: int) -> Tensor:
        """Return the positions of the answers' first and last pieces: [rows, 2] int64."""
        return torch.from_numpy(np.stack([row.target + self.pieces.shift(row, width) for row in rows]))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of start and end, each over all positions of the batch, as in transformers'
        classes."""
        start, end = logits.unbind(-1)
        return F.cross_entropy(start, targets[:, 0], reduction="sum") + F.cross_entropy(
            end, targets[:, 1], reduction="sum"
        )

    def count(self, rows: Sequence[InputRow]) -> int:
        return 2 * len(rows)


def _target(characters: NDArray[np.int64], answer: Answer | None, first: int, null: int) -> NDArray[np.int64]:
    """Return the positions of the answer's first and last piece; those of the class piece if the window does not show
    the whole answer."""
    absent = np.array([null, null], np.int64)
    if answer is None or not answer.text or not len(characters):
        return absent
    begin, end = answer.start, answer.start + len(answer.text)
    if not characters[0, 0] <= begin < end <= characters[-1, 1]:
        return absent
    covered = np.flatnonzero((characters[:, 1] > begin) & (characters[:, 0] < end))
    return np.array([first + covered[0], first + covered[-1]], np.int64) if len(covered) else absent


def _without_spaces(offsets: NDArray[np.int64], text: str) -> NDArray[np.int64]:
    """Return the offsets of pieces without leading spaces. Some tokenizers include the space before a word in its first
    piece, but an answer does not begin with it."""
    trimmed = offsets.copy()
    for index, (begin, end) in enumerate(offsets.tolist()):
        piece = text[begin:end]
        trimmed[index, 0] += len(piece) - len(piece.lstrip())
    return trimmed
