"""Measures a run's last checkpoint: by its recipe's tasks (`evaluation.tasks`), and by the loss on hidden tokens under
the first recipe's rows and masks, which are the same for all runs.

The held-out loss that a run records is under its own masks: at 30 % masked, tokens are harder to guess than at 15 %,
and in whole words harder than in pieces. So the networks are also asked to fill the first recipe's masks, with whatever
encoder and language-model head they have. One without such a head (a discriminator) has no figure there.
"""

from collections.abc import Mapping, Sequence

import torch

from checkpoints.layout import CheckpointName
from checkpoints.listing import committed
from data_service.samples.spec import StreamSpec
from data_service.store.base import Store
from data_service.stream.stream import Stream
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.objectives.losses import ObjectiveModule
from encoder_core.train.collate import to_batch
from encoder_core.train.metrics import means, sum_losses
from encoder_core.train.step import Microbatch
from launcher.after.diagnose.evaluate import evaluate_commit
from launcher.after.diagnose.states import Checkpoint, open_checkpoint
from launcher.runtime.recipe.evaluation import EvaluationTask
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.timeline import recipe_after
from launcher.runtime.run.evaluations import read_commit
from launcher.runtime.run.record import Run
from launcher.runtime.run.sealed import Sealed, keep, name_of, read
from launcher.runtime.run.streams import heldout_spec

ROWS = 1024
"""Held-out rows, at most, that every network is measured on."""


class Common(Sealed):
    """The figures of a checkpoint on given rows. `rows_of`: fingerprint of the spec of the rows."""

    weights: str
    rows_of: str
    figures: dict[str, float]

    @property
    def path(self) -> str:
        return _path(self.weights, self.rows_of)


def common_rows(run: Run) -> StreamSpec | None:
    """Return the held-out rows and masks of `run`; None if it is not trained to fill masks."""
    mlm = run.recipe.objective.mlm
    if mlm is None:
        return None
    spec = heldout_spec(run, run.tokenizer())
    return spec.model_copy(update={"masking": RecipeObjective(mlm=mlm).masking})


def ensure_measured(
    run: Run, rows: StreamSpec | None, tasks: Sequence[EvaluationTask], store: Store
) -> list[str]:
    """Make the missing measurements of the run's last checkpoint. Return, as lines for the user, those that failed.

    Raises CheckpointError, StoreError.
    """
    mark = _last(run)
    failed = evaluate_commit(run, mark, tasks).failed
    if rows is not None and known(run, rows, store) is None:
        checkpoint = open_checkpoint(run, mark.step)
        figures = _filled(checkpoint, rows)
        keep(store, Common(weights=checkpoint.frozen.digest, rows_of=rows.fingerprint, figures=dict(figures)))
    return [f"{task}: {reason}" for task, reason in failed.items()]


def known(run: Run, rows: StreamSpec, store: Store) -> Mapping[str, float] | None:
    """Return what was measured on these rows of its last checkpoint; None if nothing was. Raises StoreError."""
    commit = read_commit(run.store, _last(run))
    found = None if commit is None else read(store, _path(commit.weights, rows.fingerprint), Common)
    return None if found is None else found.figures


def _last(run: Run) -> CheckpointName:
    return committed(run.store)[0]


def _path(weights: str, rows_of: str) -> str:
    return f"measured/{name_of([weights, rows_of, ROWS])}.json"


def _filled(checkpoint: Checkpoint, spec: StreamSpec) -> Mapping[str, float]:
    """Return `mlm_loss` in nats per masked token, and `mlm_accuracy`; empty for a network without a language-model
    head."""
    run = checkpoint.run
    recipe = recipe_after(run.recipe, checkpoint.step)
    module = language_model(checkpoint.objective, recipe, checkpoint.frozen.tokenizer)
    if module is None or run.recipe.model.max_length < spec.length:
        return {}
    stream = Stream(spec, cache=run.store.at("cache"))
    count, size = min(ROWS, stream.samples_per_epoch), 32
    microbatches = (
        Microbatch(index, to_batch(stream.read(0, first, min(first + size, count)), torch.device("cpu")))
        for index, first in enumerate(range(0, count, size))
    )
    with torch.no_grad():
        figures = means(sum_losses(module, module, microbatches, 0))
    return {name: figures[name] for name in ("mlm_loss", "mlm_accuracy")}


def language_model(trained: ObjectiveModule, recipe: Recipe, tokenizer: Tokenizer) -> ObjectiveModule | None:
    """Return the encoder and the language-model head of a trained network, in evaluation mode; None if it has no such
    head."""
    objective = recipe.objective
    if objective.mlm is None or objective.rtd is not None:
        return None
    config = recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    module = objective_module(config, RecipeObjective(mlm=objective.mlm))
    weights = dict(trained.named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name not in weights:
                return None
            parameter.copy_(weights[name])
    return module.eval()
