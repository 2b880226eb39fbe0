"""What was measured of a run's checkpoints, kept with the run.

    evaluations/commits/step-00001000-a000002.json    which weights a commit holds
    evaluations/3f2a.../9c01....json                  a result: by weights, then by all that decides it

An evaluation is a function of (weights, task, data, settings, seed), so a result's name is the hash of those. Both
kinds of objects are written once, by conditional put, and never changed: whoever comes second has computed the same.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from checkpoints.layout import Mark
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.together import together
from launcher.diagnose.figures import Figure
from launcher.diagnose.settings import EvaluationTask

ROOT = "evaluations/"
VERSION = 1
"""Of the measures: another one where the same inputs would give other figures."""
_COMMITS = f"{ROOT}commits/"
_NAMED = 32  # hexadecimal digits of a hash in a name


class _Object(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_T = TypeVar("_T", bound=_Object)


class Commit(_Object):
    """Which weights a commit holds."""

    step: int
    attempt: int
    weights: str


class Cell(_Object):
    """All that decides a result.

    Attributes:
        weights: digest of the encoder and what belongs to it.
        task: what is measured, and how.
        data: digest of the examples, or of the held-out text.
        seed: of what is drawn.
        version: `VERSION` of the code that measures.
    """

    weights: str
    task: EvaluationTask
    data: str
    seed: int
    version: int = VERSION

    @property
    def key(self) -> str:
        """Name of its object. Where a task's data lie decides nothing."""
        content = self.model_dump(mode="json")
        for measure in content["task"].values():
            measure.pop("data", None)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"{_of_weights(self.weights)}{digest[:_NAMED]}.json"


class Result(_Object):
    """A cell's figures, and how many seconds they took."""

    cell: Cell
    figures: tuple[Figure, ...]
    seconds: float


@dataclass(frozen=True)
class Evaluated:
    """A commit and what was measured of its weights."""

    commit: Commit
    results: tuple[Result, ...]


def read_commit(store: Store, mark: Mark) -> Commit | None:
    """What is known of a commit; None if nothing is. Raises StoreError."""
    return _read(store, _commit_key(mark), Commit)


def write_commit(store: Store, mark: Mark, weights: str) -> None:
    """Raises StoreError."""
    commit = Commit(step=mark.step, attempt=mark.attempt, weights=weights)
    store.put_if_absent(_commit_key(mark), _dump(commit))


def read_result(store: Store, cell: Cell) -> Result | None:
    """The cell's result; None if it was not computed yet, or cannot be read. Raises StoreError."""
    found = _read(store, cell.key, Result)
    return found if found is not None and found.cell.key == cell.key else None


def write_result(store: Store, result: Result) -> bool:
    """Whether it is ours that stays. A damaged object in its place is replaced. Raises StoreError."""
    if store.put_if_absent(result.cell.key, _dump(result)):
        return True
    if read_result(store, result.cell) is not None:
        return False
    store.put(result.cell.key, _dump(result))
    return True


def results_of(store: Store, weights: str) -> list[Result]:
    """All that is known of some weights, by name. Raises StoreError."""
    keys = [entry.key for entry in store.list(_of_weights(weights))]
    return [result for result in together(lambda key: _read(store, key, Result), keys) if result is not None]


def unevaluated(store: Store, mark: Mark, tasks: Sequence[EvaluationTask]) -> bool:
    """Whether one of `tasks` has no result of this commit's weights yet. Raises StoreError."""
    commit = read_commit(store, mark)
    if commit is None:
        return True
    done = [result.cell for result in results_of(store, commit.weights)]
    return any(task not in [cell.task for cell in done if cell.version == VERSION] for task in tasks)


def evaluated(store: Store) -> Iterator[Evaluated]:
    """Every commit of which something was measured, by step and attempt, those that are deleted included.

    Raises StoreError.
    """
    keys = [entry.key for entry in store.list(_COMMITS)]
    commits = [commit for commit in together(lambda key: _read(store, key, Commit), keys) if commit]
    for commit in sorted(commits, key=lambda commit: (commit.step, commit.attempt)):
        yield Evaluated(commit, tuple(results_of(store, commit.weights)))


def _commit_key(mark: Mark) -> str:
    return f"{_COMMITS}step-{mark.step:08d}-a{mark.attempt:06d}.json"


def _of_weights(weights: str) -> str:
    return f"{ROOT}{weights[:_NAMED]}/"


def _dump(content: _Object) -> bytes:
    return (content.model_dump_json(indent=1) + "\n").encode()


def _read(store: Store, key: str, kind: type[_T]) -> _T | None:
    """None if it is absent, damaged, or of a version that nobody here knows: then it is made again."""
    try:
        return kind.model_validate_json(store.get(key))
    except (KeyMissing, ValidationError):
        return None
