"""A model to evaluate: a run's checkpoint or a model's folder, which is exported or fetched only when a cell needs its
files. A checkpoint's digest covers its manifest, which holds the hashes of the weights, and the recipe's model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from checkpoints.layout import CheckpointName
from checkpoints.listing import list_committed
from data_service.store.base import digest
from data_service.store.open import open_store
from launcher.after.finetune.pretrained import LocalModel, open_pretrained
from launcher.errors import RunError
from launcher.runtime.recipe.timeline import recipe_after
from launcher.runtime.run.record import RECORD_FILE, Run, open_run
from launcher.runtime.run.sealed import hash_json


@dataclass(frozen=True)
class EvaluatedModel:
    """A model whose files are not on this machine yet; attributes as in `LocalModel`."""

    source: str
    step: int | None
    digest: str

    @contextmanager
    def open(self) -> Iterator[LocalModel]:
        """Export or fetch the model to this machine's disk for the `with` block. Raises as `open_pretrained`."""
        with open_pretrained(self.source, self.step) as found:
            yield replace(found, digest=self.digest)


def find_models(sources: Sequence[str], steps: Sequence[int] | None) -> list[EvaluatedModel]:
    """Return the models at `sources`: the checkpoints of runs at `steps` (None: all; empty: the newest), and folders.

    Raises the errors of `open_pretrained`, and RunError if `steps` are given but all sources are folders, or if a run
    lacks the checkpoint of a step.
    """
    runs = [source for source in sources if open_store(source).size(RECORD_FILE) is not None]
    if steps != [] and not runs:
        raise RunError(f"no run among {', '.join(sources)}: folders have no steps", remedy="leave out --step")
    return [
        model
        for source in sources
        for model in (_checkpoint_models(source, steps) if source in runs else [_model_in_folder(source)])
    ]


def _model_in_folder(source: str) -> EvaluatedModel:
    with open_pretrained(source) as found:
        return EvaluatedModel(source, None, found.digest)


def _checkpoint_models(source: str, steps: Sequence[int] | None) -> Iterator[EvaluatedModel]:
    run = open_run(source)
    # Reversed (oldest first), so that of a step's checkpoints the dictionary keeps the newest attempt's.
    newest = {mark.step: mark for mark in reversed(list_committed(run.store))}
    wanted = sorted(newest) if steps is None else steps or sorted(newest)[-1:]
    lacking = [step for step in wanted if step not in newest]
    if lacking or not wanted:
        what = f"of step {lacking[0]}" if lacking else "yet"
        there = ", ".join(map(str, sorted(newest))) or "none"
        raise RunError(f"{source} has no checkpoint {what}", remedy=f"its checkpoints: {there}")
    yield from (EvaluatedModel(source, step, _checkpoint_digest(run, newest[step])) for step in wanted)


def _checkpoint_digest(run: Run, checkpoint_name: CheckpointName) -> str:
    """Return a digest of everything that a checkpoint's exported files depend on."""
    model = recipe_after(run.recipe, checkpoint_name.step).model
    recipe = [model.model_dump(mode="json"), run.recipe.objective.model_dump(mode="json")]
    return hash_json([digest(run.store.get(checkpoint_name.manifest_key)), recipe, run.record.inputs.tokenizer])
