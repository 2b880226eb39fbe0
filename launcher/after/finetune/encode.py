"""Encodes a task's examples as rows of token ids for transformers' Trainer, and scores the Trainer's outputs.

A text that is too long for one row becomes several overlapping windows. Each word of a tagged sentence is predicted in
the window that shows most of its context. The answer to a question may be in any window of the question's context.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.after.finetune.model import Head
from launcher.after.finetune.settings import FinetuneSettings, TaskMismatch
from launcher.after.tasks.examples import Answer, Examples, Questions, Sentences, TaggedSentences, select_examples
from launcher.after.tasks.metrics import compute_metrics
from launcher.after.tasks.task import Task
from launcher.errors import EVALUATE_EXTRA, describe_error, import_optional

IGNORED_LABEL = -100
"""The label of positions that the loss ignores."""
_MIN_CONTEXT_TOKENS = 8  # least number of context tokens in a window
_MODEL_INPUTS = ("input_ids", "token_type_ids", "attention_mask")  # the tokenizer's outputs that models take
OutputArray = NDArray[np.float32]  # logits, as `Trainer.predict` returns them


@dataclass(frozen=True)
class ContextWindow:
    """The part of a question's context that one row holds.

    Attributes:
        question: index of the example.
        first: position in the row of the window's first context token.
        null: position in the row of the class token. Its logits score "no answer".
        characters: [tokens, 2], the characters of the context at which each token begins and ends.
    """

    question: int
    first: int
    null: int
    characters: NDArray[np.int64]


@dataclass(frozen=True)
class BestAnswer:
    """The best span of a question's context, in characters, and its `score`, the sum of two logits. `null`: the score
    of "no answer", which is the lowest over the question's windows."""

    begin: int = 0
    end: int = 0
    score: float = -np.inf
    null: float = np.inf

    @property
    def margin(self) -> float:
        """Score of "no answer" minus the score of the best span; infinite without a span."""
        return self.null - self.score


def find_answers(
    question_count: int, windows: Sequence[ContextWindow], logits: NDArray[np.float32], max_answer_tokens: int
) -> list[BestAnswer]:
    """Return the best answer to each question; of spans with equal scores, the first.

    Args:
        logits: scores of each window's tokens as first and as last token of the answer, [windows, tokens, 2].
        max_answer_tokens: largest number of tokens of an answer.
    """
    found = [BestAnswer() for _ in range(question_count)]
    for window, scores in zip(windows, logits, strict=True):
        before, best = found[window.question], _best_span(window, scores, max_answer_tokens)
        null = min(before.null, float(scores[window.null].sum()))
        kept = best if best.score > before.score else before
        found[window.question] = BestAnswer(kept.begin, kept.end, kept.score, null)
    return found


def _best_span(window: ContextWindow, scores: NDArray[np.float32], max_answer_tokens: int) -> BestAnswer:
    inside = scores[window.first : window.first + len(window.characters)].astype(np.float64)
    if not len(inside):
        return BestAnswer()
    begin, end = window.characters.T
    first, last = np.indices((len(inside), len(inside)), sparse=True)
    possible = (first <= last) & (last < first + max_answer_tokens) & (begin[:, None] < end[None, :])
    values = np.where(possible, inside[:, :1] + inside[:, 1], -np.inf)
    a, b = divmod(int(values.argmax()), len(inside))
    return BestAnswer(int(begin[a]), int(end[b]), float(values[a, b]))


def answer_texts(best_answers: Sequence[BestAnswer], contexts: Sequence[str], no_answer_threshold: float) -> list[str]:
    """Return the text of each question's best span; "" if the margin of "no answer" exceeds `no_answer_threshold`."""
    return [
        "" if one.margin > no_answer_threshold else context[one.begin : one.end].strip()
        for one, context in zip(best_answers, contexts, strict=True)
    ]


def best_no_answer_threshold(
    margins: Sequence[float], answer_scores: Sequence[float], no_answer_scores: Sequence[float]
) -> float:
    """Return the threshold of "no answer" with the largest sum of the questions' scores; of several, the smallest.

    Args:
        margins: margin of "no answer" for each question (`BestAnswer.margin`).
        answer_scores, no_answer_scores: metric of each question if its best span, or "no answer", is predicted.
    """
    finite = np.isfinite(margins)  # a question without a span is unanswered at every threshold
    if not finite.any():
        return 0.0
    apart = np.asarray(margins, np.float64)[finite]
    order = np.argsort(apart, kind="stable")
    ascending = apart[order]
    gain = (np.asarray(answer_scores, np.float64) - np.asarray(no_answer_scores, np.float64))[finite][order]
    totals = np.concatenate([[0.0], np.cumsum(gain)])
    # A threshold can only separate different margins. Questions with margins below it are answered.
    cuts = np.concatenate([[True], ascending[1:] > ascending[:-1], [True]])
    best = int(np.argmax(np.where(cuts, totals, -np.inf)))
    # The threshold lies midway between two margins, so that rounding moves no question across it.
    sides = np.concatenate([[ascending[0] - 2.0], ascending, [ascending[-1] + 2.0]])
    return float(sides[best] + sides[best + 1]) / 2


@dataclass(frozen=True)
class Scores:
    """Metrics by name, the task's main metric first, and the threshold of "no answer"."""

    metrics: dict[str, float]
    threshold: float | None = None


@dataclass(frozen=True)
class ExampleEncoder:
    """Encodes the examples of `task` as rows of at most `max_length` tokens."""

    task: Task
    tokenizer: Any
    settings: FinetuneSettings
    max_length: int

    @property
    def head(self) -> Head:
        """The kind of transformers' head for the task."""
        return head_for_task(self.task)

    def encode(self, examples: Examples) -> "EncodedSplit":
        """Encode examples. Raises TaskMismatch if a text cannot be cut, or a question leaves no room for a context."""
        match examples:
            case Sentences():
                return EncodedSentences(self.task, examples, self._encode_sentences(examples))
            case TaggedSentences():
                return self._encode_words(examples)
            case Questions():
                return self._encode_questions(examples)
        raise AssertionError(f"{self.task.kind} has no head, so head_for_task has raised before")

    def _encode_sentences(self, examples: Sentences) -> Any:
        second = None if examples.second is None else list(examples.second)
        cut = "only_first" if second is None else self.task.truncation
        labels = examples.labels.astype(np.int64 if self.task.labels else np.float32)
        try:
            encoded = self.tokenizer(
                list(examples.first), second, truncation=cut, max_length=self.max_length, verbose=False
            )
        except Exception as error:  # the library has no error class for a text that is too short to cut
            raise self._too_long_error(cut, describe_error(error)) from error
        if max(map(len, encoded["input_ids"])) > self.max_length:
            raise self._too_long_error(cut, "the text that may not be cut is longer")
        return _build_dataset(encoded, labels=labels)

    def _too_long_error(self, truncation: str, why: str) -> TaskMismatch:
        return TaskMismatch(
            f"texts cannot be cut to max_length {self.max_length:,} with truncation {truncation}: {why}",
            remedy="set the task's truncation to longest_first",
        )

    def _encode_words(self, examples: TaggedSentences) -> "EncodedWords":
        """Encode sentences. A word is labelled at its first token, in the window with the most text around it."""
        texts = [[self._without_dropped_characters(word) for word in words] for words in examples.words]
        encoded = self._tokenize_windows([" ".join(words) for words in texts], None)
        ends = [np.array(list(accumulate(len(word) + 1 for word in words)), np.int64) - 1 for words in texts]
        places = [np.full((len(words), 2), -1, np.int64) for words in texts]
        context = [np.full(len(words), -1, np.int64) for words in texts]
        for row, example in enumerate(encoded["overflow_to_sample_mapping"]):
            for word, at, around in _first_word_tokens(encoded, row, ends[example]):
                if around > context[example][word]:
                    context[example][word], places[example][word] = around, (row, at)
        labels = [np.full(len(ids), IGNORED_LABEL, np.int64) for ids in encoded["input_ids"]]
        for tags, found in zip(examples.tags, places, strict=True):
            for tag, (row, at) in zip(tags, found, strict=True):
                if row >= 0:
                    labels[row][at] = tag
        return EncodedWords(self.task, examples, _build_dataset(encoded, labels=labels), places)

    def _without_dropped_characters(self, word: str) -> str:
        """Return a word without characters that tokenizers drop (control, format, unassigned); the unknown token if
        nothing is left."""
        kept = "".join(one for one in word if not unicodedata.category(one).startswith("C"))
        return kept if kept.strip() else self.tokenizer.unk_token or self.tokenizer.mask_token

    def _encode_questions(self, examples: Questions) -> "EncodedQuestions":
        questions = [self._shorten_question(question.strip()) for question in examples.questions]
        encoded = self._tokenize_windows(questions, list(examples.contexts))
        windows, spans = [], []
        for row, example in enumerate(encoded["overflow_to_sample_mapping"]):
            window = self._context_window(encoded, row, example, examples.contexts[example])
            answers = examples.answers[example]
            windows.append(window)
            spans.append(_answer_token_positions(window, answers[0] if answers else None))
        start, end = np.array(spans, np.int64).T
        dataset = _build_dataset(encoded, start_positions=start, end_positions=end)
        return EncodedQuestions(self.task, examples, dataset, windows, self.settings.max_answer)

    def _tokenize_windows(self, first: list[str], second: list[str] | None) -> Any:
        """Return the tokenizer's encoding of texts or pairs, in which long ones become several overlapping rows."""
        around = self.tokenizer.num_special_tokens_to_add(pair=second is not None)
        room = self.max_length - around - (0 if second is None else self.settings.max_query)
        if room < _MIN_CONTEXT_TOKENS:
            raise TaskMismatch(
                f"max_length {self.max_length} leaves room for {max(room, 0)} tokens of a text",
                remedy="raise max_length, or lower max_query",
            )
        return self.tokenizer(
            first,
            second,
            truncation="only_first" if second is None else "only_second",
            max_length=self.max_length,
            stride=min(self.settings.stride, room // 2),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            verbose=False,
        )

    def _shorten_question(self, question: str) -> str:
        """Return the question, cut after its first `max_query` tokens."""
        encoded = self.tokenizer(question, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = encoded["offset_mapping"]
        most = self.settings.max_query
        return question if len(offsets) <= most else question[: offsets[most - 1][1]]

    def _context_window(self, encoded: Any, row: int, example_index: int, context: str) -> ContextWindow:
        part, ids = encoded.sequence_ids(row), encoded["input_ids"][row]
        inside = [index for index, which in enumerate(part) if which == 1]
        null = next(i for i, token in enumerate(ids) if token == self.tokenizer.cls_token_id and part[i] is None)
        offsets = [encoded["offset_mapping"][row][index] for index in inside]
        # Some tokenizers include the space before a word in its first token, but no answer begins with it.
        bare = [(end - len(context[begin:end].lstrip()), end) for begin, end in offsets]
        return ContextWindow(example_index, inside[0] if inside else 0, null, np.array(bare, np.int64).reshape(-1, 2))


def head_for_task(task: Task) -> Head:
    """Return the head for a kind of task. Raises TaskMismatch if models are not fine-tuned for this kind."""
    match task.kind:
        case "classification" | "pair_classification" | "regression":
            return "SequenceClassification"
        case "tagging":
            return "TokenClassification"
        case "span":
            return "QuestionAnswering"
    raise TaskMismatch(
        f"the task {task.name} is of kind {task.kind}, which is measured and not fine-tuned",
        remedy="use `maskfleet embed`, or a task of another kind",
    )


def _build_dataset(encoded: Mapping[str, Any], **labels: Any) -> Any:
    columns = {name: encoded[name] for name in _MODEL_INPUTS if name in encoded}
    return import_optional("datasets", "fine-tuning", EVALUATE_EXTRA).Dataset.from_dict({**columns, **labels})


def _first_word_tokens(encoded: Any, row: int, word_ends: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return, for each word whose first token is in the row: the word's index, the token's position, and the smaller of
    the numbers of text tokens before and after it. `word_ends`: the character at which each word ends."""
    text = [index for index, part in enumerate(encoded.sequence_ids(row)) if part is not None]
    offsets = np.array([encoded["offset_mapping"][row][index] for index in text], np.int64).reshape(-1, 2)
    # A token belongs to the first word that ends after the token begins. So a space belongs to the word after it.
    word_of = np.searchsorted(word_ends, offsets[:, 0], side="right")
    starts = np.r_[0, word_ends + 1][word_of]  # a later window may begin inside of a word
    begins = (np.diff(word_of, prepend=-1) != 0) & (offsets[:, 0] <= starts)
    return [
        (int(word_of[index]), text[index], min(index, len(text) - 1 - index))
        for index in np.flatnonzero(begins).tolist()
        if word_of[index] < len(word_ends)
    ]


def _answer_token_positions(window: ContextWindow, answer: Answer | None) -> tuple[int, int]:
    """Return the positions of the answer's first and last token; both are the class token's if the window does not
    hold the whole answer."""
    characters, absent = window.characters, (window.null, window.null)
    if answer is None or not answer.text or not len(characters):
        return absent
    begin, end = answer.start, answer.start + len(answer.text)
    if not characters[0, 0] <= begin < end <= characters[-1, 1]:
        return absent
    covered = np.flatnonzero((characters[:, 1] > begin) & (characters[:, 0] < end))
    return (window.first + int(covered[0]), window.first + int(covered[-1])) if len(covered) else absent


@dataclass(frozen=True)
class EncodedSentences:
    """Encoded texts or pairs of texts, a row for each."""

    task: Task
    examples: Sentences
    dataset: Any

    def compute_scores(self, outputs: OutputArray, threshold: float | None = None) -> Scores:
        """Return the metrics of the Trainer's outputs. `threshold` is not used."""
        found = outputs.argmax(-1).astype(np.int64) if self.task.labels else outputs.reshape(-1).astype(np.float64)
        return Scores(compute_metrics(self.task, self.examples, found))


@dataclass(frozen=True)
class EncodedWords:
    """Encoded tagged sentences. `places`: for each sentence, [words, 2], the row and position at which each word is
    predicted; -1 for a word without a token, which gets the tag O, or the task's first tag if there is no O."""

    task: Task
    examples: TaggedSentences
    dataset: Any
    places: Sequence[NDArray[np.int64]]

    def compute_scores(self, outputs: OutputArray, threshold: float | None = None) -> Scores:
        """Return the metrics of the Trainer's outputs. `threshold` is not used."""
        likeliest = outputs.argmax(-1)
        unread = self.task.labels.index("O") if "O" in self.task.labels else 0
        tags = tuple(
            tuple(int(likeliest[row, at]) if row >= 0 else unread for row, at in found) for found in self.places
        )
        return Scores(compute_metrics(self.task, self.examples, tags))


@dataclass(frozen=True)
class EncodedQuestions:
    """Encoded questions, a row for each window of a question's context."""

    task: Task
    examples: Questions
    dataset: Any
    windows: Sequence[ContextWindow]
    max_answer: int

    def compute_scores(self, outputs: tuple[OutputArray, OutputArray], threshold: float | None = None) -> Scores:
        """Return the metrics of the Trainer's outputs, and the threshold of "no answer"."""
        logits = np.stack(outputs, axis=-1)
        questions = self.examples
        found = find_answers(len(questions), self.windows, logits, self.max_answer)
        if self.task.no_answer and threshold is None:
            always = answer_texts(found, questions.contexts, np.inf)
            margins = [one.margin for one in found]
            threshold = best_no_answer_threshold(
                margins, self._score_each_question(always), self._score_each_question([""] * len(always))
            )
        texts = answer_texts(found, questions.contexts, np.inf if threshold is None else threshold)
        metrics = compute_metrics(self.task, questions, dict(zip(questions.ids, texts, strict=True)))
        return Scores(metrics, threshold)

    def _score_each_question(self, texts: Sequence[str]) -> list[float]:
        """Return the main metric of each question alone. The mean of these is the metric of all questions."""
        main = self.task.model_copy(update={"metrics": self.task.metrics[:1]})
        found: list[float] = []
        for index, text in enumerate(texts):
            one = select_examples(self.examples, [index])
            found += compute_metrics(main, one, {one.ids[0]: text}).values()
        return found


EncodedSplit = EncodedSentences | EncodedWords | EncodedQuestions
"""The rows of a split (`dataset`, of `datasets`). `compute_scores` turns outputs of `Trainer.predict` into metrics.
`threshold`: the threshold of "no answer" found on dev; None: it is found on these rows."""
