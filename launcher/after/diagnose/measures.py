"""Measures of a frozen encoder: a linear probe, cosines against human judgements, and held-out loss. Also reads
the examples of the tasks that are measured.

The probe is scikit-learn's logistic regression on hidden states. The encoder is never trained on the task, so the
probe's accuracy says what pretraining alone put into it. The baseline is the same network with its initial weights:
random features classify better than chance.

Held-out loss is measured by length: the same text is cut into rows of at most 32, 64, 128, ... tokens up to the run's
own length, which shows what the model gains from context. It is also measured by source: each corpus of the recipe
alone, at the run's own length. Masks are those of the run's own evaluation, dropout is off. Everything is computed in
fp32, so the figures of a run in bf16 differ a little from those that its ranks record.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from data_service.samples.lanes import Lanes
from data_service.samples.spec import StreamSpec
from data_service.stream.stream import Stream
from encoder_core.objectives.modules.losses import CoupledObjective
from encoder_core.train.metrics import figures_from_sums, sum_losses
from encoder_core.train.step import Microbatch
from launcher.after.diagnose.states import Checkpoint, FrozenEncoder, encode_text_rows, pooled_states
from launcher.after.tasks.examples import Sentences, examples_digest, select_examples
from launcher.after.tasks.measurable import load_measured_task, splits_to_read
from launcher.after.tasks.task import Task
from launcher.errors import EVALUATE_EXTRA, RunError, import_optional
from launcher.runtime.rank.build import attach_teachers
from launcher.runtime.rank.collate import to_batch
from launcher.runtime.recipe.parts import EvaluationTask, Pooling
from launcher.runtime.recipe.timeline import phase_at
from launcher.runtime.run.evaluations import Figure
from launcher.runtime.run.streams import heldout_spec

_L2_PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)  # factors of the sum of squared weights, added to the mean loss
_MAX_ITERATIONS = 1000  # largest number of iterations for each penalty
_PROBE_PURPOSE = "a linear probe"  # what needs a package, for the message if it is not installed


@dataclass(frozen=True)
class ProbeSplits:
    """The splits of a probe: to fit it, to choose its penalty, and to measure it."""

    train: Sentences
    dev: Sentences
    test: Sentences


@dataclass(frozen=True)
class _ProbeScores:
    """The accuracies, on dev and on test, of the probe with the best penalty."""

    dev: float
    test: float


def measure_linear_probe(frozen: FrozenEncoder, splits: ProbeSplits, pooling: Pooling = "mean") -> list[Figure]:
    """Return the accuracies of linear probes on the test split.

    `accuracy`: on the states of each layer, and on those of all layers concatenated (no layer). `best_accuracy`: on the
    layer that is best on dev, `best_layer`. `majority`: accuracy of always predicting the largest class of train.

    For pairs of texts, the features are |u - v| and u * v (SentEval, 1803.05449). Features are standardised by their
    mean and deviation on train. The result is deterministic.

    Raises RunError if a split is empty, or train has a single class; MissingPackage if scikit-learn is not installed.
    """
    _check_splits(splits)
    train, dev, test = (_probe_features(frozen, part, pooling) for part in (splits.train, splits.dev, splits.test))
    layers = [_fit_probe((train[layer], dev[layer], test[layer]), splits) for layer in range(len(train))]
    whole = _fit_probe((_concatenate_layers(train), _concatenate_layers(dev), _concatenate_layers(test)), splits)
    best = max(range(len(layers)), key=lambda layer: layers[layer].dev)
    common = int(np.bincount(splits.train.labels.astype(np.int64)).argmax())
    return [
        Figure(measure="accuracy", value=whole.test, pooling=pooling),
        *(
            Figure(measure="accuracy", value=layer.test, layer=depth, pooling=pooling)
            for depth, layer in enumerate(layers)
        ),
        Figure(measure="best_accuracy", value=layers[best].test, pooling=pooling),
        Figure(measure="best_layer", value=best, pooling=pooling),
        Figure(measure="majority", value=float((splits.test.labels == common).mean())),
    ]


def _check_splits(splits: ProbeSplits) -> None:
    for name in ("train", "dev", "test"):
        if not len(getattr(splits, name)):
            raise RunError(f"the probe's {name} split is empty", remedy="name a task that has examples")
    if len(np.unique(splits.train.labels)) < 2:
        raise RunError("all training examples of the probe have the same label", remedy="give more or other examples")


def _probe_features(frozen: FrozenEncoder, sentences: Sentences, pooling: Pooling) -> NDArray[np.float32]:
    """Return the features of N examples for D layers, [D, N, F]. F is the hidden size, or twice that for pairs."""
    first = pooled_states(frozen, encode_text_rows(frozen, sentences.first), (pooling,))[pooling]
    if sentences.second is None:
        return first
    second = pooled_states(frozen, encode_text_rows(frozen, sentences.second), (pooling,))[pooling]
    return np.concatenate([np.abs(first - second), first * second], axis=2)


def _concatenate_layers(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the features of all layers concatenated: [D, N, F] to [N, D * F]."""
    return features.transpose(1, 0, 2).reshape(features.shape[1], -1)


def _fit_probe(split_features: tuple[NDArray[np.float32], ...], splits: ProbeSplits) -> _ProbeScores:
    """Fit a logistic regression with each penalty, and return the accuracies of the one that is best on dev."""
    scaler = (
        import_optional("sklearn.preprocessing", _PROBE_PURPOSE, EVALUATE_EXTRA).StandardScaler().fit(split_features[0])
    )
    train, dev, test = (scaler.transform(part) for part in split_features)
    regression = import_optional("sklearn.linear_model", _PROBE_PURPOSE, EVALUATE_EXTRA).LogisticRegression
    fits = [
        regression(C=1 / (2 * penalty * len(train)), max_iter=_MAX_ITERATIONS).fit(train, splits.train.labels)
        for penalty in _L2_PENALTIES
    ]
    best = max(fits, key=lambda fit: fit.score(dev, splits.dev.labels))
    return _ProbeScores(best.score(dev, splits.dev.labels), best.score(test, splits.test.labels))


def measure_similarity(frozen: FrozenEncoder, pairs: Sentences, poolings: Sequence[Pooling]) -> list[Figure]:
    """Return `spearman`, the rank correlation of cosines with the scores of `pairs`, for each layer and pooling.

    Raises:
        RunError: if the task has single texts, or fewer than two pairs.
        MissingPackage: if scipy is not installed.
    """
    if pairs.second is None or len(pairs) < 2:
        raise RunError("similarity needs at least two pairs of texts with scores", remedy="name a similarity task")
    pooled = pooled_states(frozen, encode_text_rows(frozen, [*pairs.first, *pairs.second]), poolings)
    return [
        Figure(measure="spearman", value=_spearman(points, pairs), layer=layer, pooling=pooling)
        for pooling in poolings
        for layer, points in enumerate(pooled[pooling])
    ]


def paired_cosines(first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the cosines of N pairs of vectors, [N]; 0 for a pair with a vector of length 0."""
    products = np.einsum("nh,nh->n", first.astype(np.float64), second.astype(np.float64))
    lengths = np.linalg.norm(first, axis=1).astype(np.float64) * np.linalg.norm(second, axis=1)
    found: NDArray[np.float64] = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return found


def _spearman(vectors: NDArray[np.floating], pairs: Sentences) -> float:
    """Return the rank correlation of cosines and scores; NaN if all cosines, or all scores, are equal."""
    found = paired_cosines(vectors[: len(pairs)], vectors[len(pairs) :])
    if np.ptp(found) == 0 or np.ptp(pairs.labels) == 0:
        return float("nan")
    stats = import_optional("scipy.stats", "similarity", EVALUATE_EXTRA)
    return float(stats.spearmanr(found, pairs.labels).statistic)


_MIN_ROW_TOKENS = 32  # shortest row length at which held-out loss is measured, in tokens
_BATCH_ROWS = 64  # largest number of rows in a forward pass


def measure_heldout_loss(checkpoint: Checkpoint, max_rows: int) -> list[Figure]:
    """Return `<term>_loss` (nats per target) and the metrics of each loss term, and the weighted `loss`, for each
    length and for each source.

    `max_rows`: largest number of rows of the run's own length. Of shorter rows, more are read, for the same number of
    tokens. If a row's loss depends on the other rows of its batch, the number of rows stays `max_rows`: batches of
    another size would be another task.

    Raises CorpusError, PlanError, StoreError if the held-out text cannot be read; for teachers, the errors of
    `launcher.runtime.run.teachers.read_teachers`.
    """
    phase, _ = phase_at(checkpoint.run.recipe, max(0, checkpoint.step - 1))
    spec = heldout_spec(checkpoint.run, checkpoint.frozen.tokenizer, phase)
    attach_teachers(checkpoint.objective, checkpoint.run, checkpoint.frozen.tokenizer)
    coupled = isinstance(checkpoint.objective, CoupledObjective)
    found = []
    for length in _measured_lengths(spec):
        cut = StreamSpec.model_validate(spec.model_dump() | {"length": length})
        count = max_rows if coupled else max_rows * spec.length // length
        figures = _heldout_metrics(checkpoint, cut, count)
        found += [Figure(measure=name, value=value, length=length) for name, value in figures.items()]
    for source in spec.sources:
        alone = source.model_copy(update={"weight": None})
        own = spec.model_copy(update={"sources": (alone,)})
        figures = _heldout_metrics(checkpoint, own, max_rows)
        found += [Figure(measure=name, value=value, source=source.name) for name, value in figures.items()]
    return found


def _measured_lengths(spec: StreamSpec) -> list[int]:
    """Return the lengths of rows to measure. XLNet's rows have only the run's length, because each reuses a fixed
    number of tokens of the row before."""
    if isinstance(spec.input, Lanes):
        return [spec.length]
    shorter = [1 << power for power in range(5, 17) if _MIN_ROW_TOKENS <= 1 << power < spec.length]
    return [*shorter, spec.length]


def _heldout_metrics(checkpoint: Checkpoint, spec: StreamSpec, rows: int) -> Mapping[str, float]:
    """Return the losses and metrics on the first `rows` rows of held-out text that `spec` describes."""
    run = checkpoint.run
    stream = Stream(spec, cache=run.store.with_prefix("cache"))
    last, size = min(rows, stream.samples_per_epoch), min(run.recipe.microbatch_rows_by_phase[-1], _BATCH_ROWS)
    microbatches = (
        Microbatch(index, to_batch(stream.read(0, first, min(first + size, last)), torch.device("cpu"), first))
        for index, first in enumerate(range(0, last, size))
    )
    return figures_from_sums(sum_losses(checkpoint.objective, checkpoint.objective, microbatches, run.recipe.seed))


SAMPLING_SEED = 0
"""The seed by which examples of a task are sampled: the same examples for every run and checkpoint."""
_PENALTY_FOLDS = 10  # if dev is the measured split, the penalty is chosen on 1/10 of train


@dataclass(frozen=True)
class TaskData:
    """A measure and its task's examples: train, dev and test for a probe, else only the measured split."""

    measure: EvaluationTask
    task: Task
    examples: tuple[Sentences, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the examples."""
        return digest_of_json([examples_digest(part) for part in self.examples])

    def measure_encoder(self, frozen: FrozenEncoder) -> list[Figure]:
        """Measure an encoder on the examples. Raises as `measure_linear_probe` and `measure_similarity`."""
        measure = self.measure
        if measure.probe:
            return measure_linear_probe(frozen, ProbeSplits(*self.examples), measure.probe.pooling)
        assert measure.similarity  # a task is measured by a probe or by similarity
        return measure_similarity(frozen, self.examples[0], measure.similarity.poolings)


def read_task_data(measure: EvaluationTask) -> TaskData | None:
    """Read the examples that a measure needs; return None if it is held-out loss.

    Without a labelled test split, a probe is measured on dev, and its penalty is chosen on a tenth of train. Raises the
    errors of `load_measured_task` and `Task.read`.
    """
    task = load_measured_task(measure)
    if task is None:
        return None
    parts = [task.read(split) for split in splits_to_read(measure, task)]
    examples = [part for part in parts if isinstance(part, Sentences)]
    assert len(examples) == len(parts)  # every kind of task that can be measured has `Sentences`
    if measure.similarity:
        return TaskData(measure, task, (examples[0],))
    assert measure.probe  # a task is measured by a probe or by similarity
    train, *others = (subsample(part, measure.probe.examples) for part in examples)
    if len(others) == 2:
        return TaskData(measure, task, (train, *others))
    order = np.random.default_rng(SAMPLING_SEED).permutation(len(train))
    apart = -(-len(train) // _PENALTY_FOLDS)
    return TaskData(
        measure, task, (select_examples(train, order[apart:]), select_examples(train, order[:apart]), *others)
    )


def digest_of_json(content: object) -> str:
    """Return the SHA-256 of `content` as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def subsample(examples: Sentences, count: int) -> Sentences:
    """Return `count` of the examples, the same ones at every call; all examples if there are fewer."""
    if len(examples) <= count:
        return examples
    return select_examples(examples, np.sort(np.random.default_rng(SAMPLING_SEED).permutation(len(examples))[:count]))
