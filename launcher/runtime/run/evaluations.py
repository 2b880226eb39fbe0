"""Stores evaluations of a run's checkpoints with the run.

    evaluations/commits/step-00001000-a000002.json    digest of the weights in a commit (a checkpoint)
    evaluations/3f2a.../9c01....json                  a result; its key: hash of the weights / hash of all inputs

A result depends on weights, task, data, settings and seed only, so the hash of these is its name. Both kinds of objects
have a digest of their content (`launcher.runtime.run.sealed`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import field_validator

from checkpoints.layout import CheckpointName
from data_service.formats import StrictRecord
from data_service.store.base import Store
from launcher.runtime.recipe.parts import EvaluationTask
from launcher.runtime.run.sealed import Sealed, hash_json, read_all_sealed, read_sealed, store_sealed

EVALUATIONS_PREFIX = "evaluations/"
MEASURES_VERSION = 3
"""Version of the measures. Increase it when a change of code changes results for the same inputs."""
_COMMITS_PREFIX = f"{EVALUATIONS_PREFIX}commits/"
_HASH_DIGITS = 32  # folder names have this many hexadecimal digits of the hash


class Figure(StrictRecord):
    """One measured number. Fields that do not apply are None.

    Attributes:
        measure: name of the measure: `spearman`, `accuracy`, `mlm_loss`, ...
        value: the number; None if it is not finite.
        layer: 0 for the embeddings, L for the output of layer L; None for all layers together, or without layers.
        pooling: how the hidden states of a text were reduced to one vector.
        length: largest number of tokens of a row in the measurement.
        source: name of the corpus (`corpus.sources`) that was measured.
    """

    measure: str
    value: float | None
    layer: int | None = None
    pooling: str | None = None
    length: int | None = None
    source: str | None = None

    @field_validator("value")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    @property
    def conditions(self) -> tuple[object, ...]:
        """All fields but the value. Figures of two checkpoints can be compared only if their conditions are equal."""
        return (self.measure, self.layer, self.pooling, self.length, self.source)


def select_measure(figures: Iterable[Figure], measure: str) -> list[Figure]:
    return [figure for figure in figures if figure.measure == measure]


class CommitWeights(Sealed):
    """The stored digest of the weights in one commit (checkpoint)."""

    step: int
    attempt: int
    weights: str

    @property
    def path(self) -> str:
        return _commit_path(CheckpointName(self.attempt, self.step))


class DiagnosticCell(StrictRecord):
    """The identity of one evaluation: all inputs that determine its result.

    Attributes:
        weights: digest of the evaluated weights (`CommitWeights.weights`).
        task: the evaluation task with its settings.
        data: digest of the examples, or of the held-out text.
        seed: seed of all random numbers.
        version: `MEASURES_VERSION` of the code that measures.
    """

    weights: str
    task: EvaluationTask
    data: str
    seed: int
    version: int = MEASURES_VERSION

    @property
    def path(self) -> str:
        """The key of the result in the store. It does not depend on the location of the task's data."""
        content = self.model_dump(mode="json")
        for measure in content["task"].values():
            measure.pop("data", None)
        return f"{_weights_prefix(self.weights)}{hash_json(content)}.json"


class DiagnosticResult(Sealed):
    """The result of one evaluation: the figures of `cell`, and the seconds that measuring them took."""

    cell: DiagnosticCell
    figures: tuple[Figure, ...]
    seconds: float

    @property
    def path(self) -> str:
        return self.cell.path


@dataclass(frozen=True)
class EvaluatedCommit:
    """A commit and all results of its weights."""

    commit: CommitWeights
    results: tuple[DiagnosticResult, ...]


def write_commit_weights(store: Store, mark: CheckpointName, weights: str) -> None:
    """Store the digest of a commit's weights. Raises StoreError."""
    store_sealed(store, CommitWeights(step=mark.step, attempt=mark.attempt, weights=weights))


def read_result(store: Store, cell: DiagnosticCell) -> DiagnosticResult | None:
    """Return the stored result of `cell`; None if there is none, or it is damaged. Raises StoreError."""
    return read_sealed(store, cell.path, DiagnosticResult)


def write_result(store: Store, result: DiagnosticResult) -> bool:
    """Store `result` unless its cell has a result. Return whether it was stored. A damaged result is replaced. Raises
    StoreError."""
    return store_sealed(store, result) is result


def read_diagnostics(store: Store, weights: str) -> list[DiagnosticResult]:
    """Return all stored results of the weights with digest `weights`, sorted by key. Raises StoreError."""
    return read_all_sealed(store, (entry.key for entry in store.list(_weights_prefix(weights))), DiagnosticResult)


def is_unevaluated(store: Store, mark: CheckpointName, tasks: Sequence[EvaluationTask]) -> bool:
    """Return whether any of `tasks` lacks a result for the weights of commit `mark`. Raises StoreError."""
    commit = read_sealed(store, _commit_path(mark), CommitWeights)
    if commit is None:
        return True
    done = [result.cell for result in read_diagnostics(store, commit.weights)]
    return any(task not in [cell.task for cell in done if cell.version == MEASURES_VERSION] for task in tasks)


def evaluated_commits(store: Store) -> list[EvaluatedCommit]:
    """Return all evaluated commits, sorted by step and attempt, even those whose checkpoint was deleted.

    This makes one listing and a request for each stored object. Raises StoreError.
    """
    keys = [entry.key for entry in store.list(EVALUATIONS_PREFIX)]
    commits = read_all_sealed(store, (key for key in keys if key.startswith(_COMMITS_PREFIX)), CommitWeights)
    folders = {_weights_prefix(commit.weights) for commit in commits}
    results: dict[str, list[DiagnosticResult]] = {folder: [] for folder in folders}
    inside = (key for key in keys if f"{key.rpartition('/')[0]}/" in folders)
    for result in read_all_sealed(store, inside, DiagnosticResult):
        results[_weights_prefix(result.cell.weights)].append(result)
    commits.sort(key=lambda commit: (commit.step, commit.attempt))
    return [EvaluatedCommit(commit, tuple(results[_weights_prefix(commit.weights)])) for commit in commits]


def _commit_path(mark: CheckpointName) -> str:
    return f"{_COMMITS_PREFIX}step-{mark.step:08d}-a{mark.attempt:06d}.json"


def _weights_prefix(weights: str) -> str:
    return f"{EVALUATIONS_PREFIX}{weights[:_HASH_DIGITS]}/"
