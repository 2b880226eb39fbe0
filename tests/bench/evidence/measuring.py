"""What is measured of runs: frozen vectors of every kept checkpoint, and fine-tunings of the last one.

Both are compared with the weights that the run began with. All are pure functions whose results are kept under the name
of what decides them, so nothing is measured twice.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from launcher.after.evaluate.cell import GridRecord, Measure, Results
from launcher.after.evaluate.compute_cell import compute
from launcher.after.evaluate.evaluation import plan

from checkpoints.hf.export import export_model, export_pair
from checkpoints.layout import CheckpointName
from checkpoints.listing import committed
from data_service.store.open import open_store
from encoder_core.families.catalogue import DetectorConfig
from launcher.after.diagnose.evaluate import CommitOutcome, evaluate_checkpoint, evaluate_commit
from launcher.after.diagnose.states import untrained
from launcher.after.evaluate.measures import measures
from launcher.after.finetune.pretrained import LocalModel, open_pretrained
from launcher.after.tasks.task import load_task
from launcher.errors import RunError
from launcher.runtime.rank.build import build_model
from launcher.runtime.recipe.evaluation import EvaluationTask, ProbeSettings, SimilaritySettings
from launcher.runtime.recipe.objective import exported_heads
from launcher.runtime.run.evaluations import write_commit
from launcher.runtime.run.record import Run

from .place import Place

BEGINNING = CheckpointName(attempt=0, step=0)
"""The weights that a run begins with, among its commits."""
DOMAIN = ("section", "proposal", "order", "markup")
SUITE = "domain"
_EXAMPLES = 20_000  # most of a split that a probe takes: all of SST-2


def frozen_tasks(place: Place) -> tuple[EvaluationTask, ...]:
    """The probe of SST-2, and similarity on every STS file."""
    probe = ProbeSettings(task=str(place.tasks / "sst2.yaml"), examples=_EXAMPLES)
    files = sorted(place.tasks.glob("sts-*.yaml"))
    similar = (SimilaritySettings(task=str(file), poolings=["mean"]) for file in files)
    return (EvaluationTask(probe=probe), *(EvaluationTask(similarity=each) for each in similar))


def measure_frozen(place: Place, run: Run) -> None:
    """The beginning and every checkpoint that the comparison keeps, with the run.

    Raises RunError: what could not be measured. DamagedCheckpoint, StoreError.
    """
    tasks = frozen_tasks(place)
    beginning = untrained(run)
    write_commit(run.store, BEGINNING, beginning.frozen.digest)
    _check(run, evaluate_checkpoint(beginning, tasks))
    for mark in sorted(committed(run.store)):
        if mark.step in place.comparison.pretraining.measured:
            _check(run, evaluate_commit(run, mark, tasks))


def _check(run: Run, outcome: CommitOutcome) -> None:
    if outcome.failed:
        what = "; ".join(f"{task}: {reason}" for task, reason in outcome.failed.items())
        raise RunError(f"{run.uri} could not be measured: {what}", remedy="see the text of the comparison")


def measure_finetuned(place: Place, family: str, seed: int, run: Run, tasks: Sequence[str] = DOMAIN) -> None:
    """Fine-tunes the last checkpoint and the beginning on each task, with the run's seed. Results are the grid's."""
    results = Results(open_store(str(place.results)))
    with both(place, family, seed, run) as models:
        works = plan(models, domain_measures(place, tasks), [seed])
        results.keep_grid(GridRecord(suite=SUITE, cells=tuple(work.cell for work in works)))
        folders = {model.digest: model for model in models}
        for work in works:
            compute(work, folders[work.cell.weights], results.store.uri, place.root / "shared")


def domain_measures(place: Place, tasks: Sequence[str]) -> list[Measure]:
    """A fine-tuning on each, with the comparison's settings."""
    chosen = place.comparison.finetuning.model_dump(mode="json", exclude_defaults=True)
    loaded = [load_task(str(place.tasks / f"{name}.yaml")) for name in tasks]
    return measures(loaded, [f"{key}={value}" for key, value in chosen.items()])


@contextmanager
def both(place: Place, family: str, seed: int, run: Run) -> Iterator[tuple[LocalModel, LocalModel]]:
    """The last checkpoint, and the weights that its run began with."""
    folder = place.untrained(family, seed)
    export_untrained(run, folder)
    with ExitStack() as stack:
        yield (
            stack.enter_context(open_pretrained(run.uri)),
            stack.enter_context(open_pretrained(str(folder))),
        )


def export_untrained(run: Run, folder: Path) -> None:
    """The run's initial weights in the transformers format, as `export_run` has them of a checkpoint."""
    tokenizer, recipe = run.tokenizer(), run.recipe
    module = build_model(recipe, tokenizer)
    config = recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    read = {name: parameter.detach() for name, parameter in module.named_parameters()}.__getitem__
    files, out = tokenizer.save_files(), open_store(str(folder))
    if recipe.objective.rtd is not None and isinstance(config, DetectorConfig):
        export_pair(read, config, files, out, recipe.objective.rtd.embeddings)
    else:
        export_model(read, config, files, out, exported_heads(config, recipe.objective))
