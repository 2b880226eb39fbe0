"""Prepares a task's examples for a model, and turns the model's logits into predictions and metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from launcher.after.finetune.inputs import Logits, Pieces, Prepared
from launcher.after.finetune.sentences import SentenceKind
from launcher.after.finetune.settings import FinetuneSettings, TaskMismatch
from launcher.after.finetune.spans import PreparedQuestions, SpanKind, best_threshold, find_answers, texts
from launcher.after.finetune.tagging import PreparedWords, TaggingKind
from launcher.after.tasks.examples import Examples, Questions, Sentences, Tagged
from launcher.after.tasks.metrics import Predictions, score
from launcher.after.tasks.task import Task

Learnable = SentenceKind | TaggingKind | SpanKind


@dataclass(frozen=True)
class PreparedSplit:
    """Examples, and the rows that a model reads for them."""

    examples: Examples
    prepared: Prepared


@dataclass(frozen=True)
class SplitScores:
    """The scores of a model on a split.

    Attributes:
        metrics: metrics by name, the task's main metric first.
        predictions: predictions for the examples.
        threshold: margin above which a question counts as unanswerable; None if every question has an answer.
    """

    metrics: dict[str, float]
    predictions: Predictions
    threshold: float | None

    @property
    def main(self) -> float:
        return next(iter(self.metrics.values()))


def kind_of(task: Task, pieces: Pieces, settings: FinetuneSettings) -> Learnable:
    """Return the kind of a task for the training loop. Raises TaskMismatch if models are not fine-tuned for this kind,
    or the task has fewer than two labels."""
    labels = tuple(task.labels)
    match task.kind:
        case "classification" | "pair_classification" | "tagging" if len(labels) < 2:
            raise TaskMismatch(
                f"the task {task.name} has {len(labels)} label(s), so there is nothing to tell apart",
                remedy="list every label in the task's `labels`",
            )
        case "classification" | "pair_classification" | "regression":
            return SentenceKind(pieces, labels, task.truncation)
        case "tagging":
            return TaggingKind(pieces, labels, settings.stride)
        case "span":
            return SpanKind(pieces, settings.stride, settings.max_query)
    raise TaskMismatch(
        f"the task {task.name} is of kind {task.kind}, which is measured and not fine-tuned",
        remedy="use `maskfleet embed`, or a task of another kind",
    )


def prepare(kind: Learnable, examples: Examples) -> PreparedSplit:
    """Turn examples into rows. Raises TaskMismatch if they do not fit the task or the model."""
    match kind:
        case SentenceKind():
            return PreparedSplit(examples, kind.prepare(cast(Sentences, examples)))
        case TaggingKind():
            return PreparedSplit(examples, kind.prepare(cast(Tagged, examples)))
        case SpanKind():
            return PreparedSplit(examples, kind.prepare(cast(Questions, examples)))


def measure(
    kind: Learnable,
    task: Task,
    split: PreparedSplit,
    logits: Sequence[Logits],
    *,
    max_answer: int,
    threshold: float | None = None,
) -> SplitScores:
    """Return predictions on a split and their metrics. `threshold`: threshold that was found on dev; None to find it on
    this split."""
    predictions: Predictions
    match kind:
        case SentenceKind():
            predictions = kind.predictions(logits)
        case TaggingKind():
            predictions = kind.predictions(cast(PreparedWords, split.prepared), logits)
        case SpanKind():
            questions, windows = cast(Questions, split.examples), cast(PreparedQuestions, split.prepared)
            answered = find_answers(len(questions), windows.windows, logits, max_answer)
            if task.no_answer and threshold is None:
                margins = [one.margin for one in answered]
                always = texts(answered, questions.contexts, float("inf"))
                found, none = (_one_by_one(task, questions, given) for given in (always, [""] * len(always)))
                threshold = best_threshold(margins, found, none)
            given = texts(answered, questions.contexts, float("inf") if threshold is None else threshold)
            predictions = dict(zip(questions.ids, given, strict=True))
    return SplitScores(score(task, split.examples, predictions), predictions, threshold)


def _one_by_one(task: Task, examples: Questions, answers: Sequence[str]) -> list[float]:
    """Return the main metric of each question alone. Their mean is the metric of all questions."""
    main = task.model_copy(update={"metrics": task.metrics[:1]})
    found: list[float] = []
    for index, answer in enumerate(answers):
        here = slice(index, index + 1)
        one = Questions(
            examples.ids[here], examples.questions[here], examples.contexts[here], examples.answers[here]
        )
        found += score(main, one, {one.ids[0]: answer}).values()
    return found
