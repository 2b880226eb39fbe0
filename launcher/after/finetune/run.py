"""One fine-tuning: a pure function of (weights, task, settings, seed)."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from checkpoints.hf.folder import publish, removable
from data_service.processes import temporary_folder
from data_service.store.open import open_store
from launcher.after.finetune.export import Provenance, write_export
from launcher.after.finetune.inputs import open_pieces
from launcher.after.finetune.loop import (
    compute_logits,
    make_optimizer,
    reproducible,
    train_updates,
    updates_each,
)
from launcher.after.finetune.measure import Learnable, PreparedSplit, SplitScores, kind_of, measure, prepare
from launcher.after.finetune.network import HeadSpec, TaskNetwork, open_config, open_network
from launcher.after.finetune.pretrained import LocalModel, check_class, folder_digest
from launcher.after.finetune.resume import Best, Scratch, TrainingState, copied, opened_scratch, restore, save
from launcher.after.finetune.settings import (
    MACHINE,
    Epoch,
    FinetuneOutcome,
    FinetuneSettings,
    TaskMismatch,
    candidates,
)
from launcher.after.tasks.examples import Examples
from launcher.after.tasks.metrics import check_measurable
from launcher.after.tasks.task import Task, digest_of_examples, load_task
from launcher.progress import work

_LOG = logging.getLogger("launcher.after.finetune")
_SAVE_S = 300.0  # time between checkpoints inside an epoch
_SHARE = 0.05  # largest share of the time for checkpoints after epochs: an epoch may be shorter than a save
_FIRST_SEED = (
    0  # seed of the model that a task starts `after`: one for all seeds of the task, as in the papers
)


def finetune(
    pretrained: LocalModel,
    task: Task,
    settings: FinetuneSettings,
    seed: int,
    out: str | None = None,
    *,
    intermediate: LocalModel | None = None,
    scratch: Path | None = None,
) -> FinetuneOutcome:
    """Fine-tune on the task's `train` split, choose the epoch on `dev`, and measure that epoch on the other splits too.

    On one kind of device the same arguments yield the same bits, in any process, whatever ran there before. A task that
    starts `after` another begins with the encoder of `intermediate`. Without it, this function makes that model itself,
    as `first_finetuned` does.

    Args:
        out: folder or s3:// URI for the chosen model, which replaces an earlier export; None: the model is not written.
        intermediate: the model fine-tuned on the task's `after`, for callers that have it.
        scratch: folder of this machine for checkpoints, from which an interrupted fine-tuning resumes with the same
            bits; None: it can only start again. The caller removes the folder when the result is safe.

    Raises:
        TaskMismatch: if checkpoint, tokenizer, task and settings do not fit each other.
        Diverged: if a loss or a gradient is not finite.
        TaskError, InputError: if the task's data are wrong.
        ExportError: if `out` holds something else.
        StoreError: if a store does not answer.
        ModelError: if transformers has no class for the model.
        MissingPackage: if transformers is not installed.
    """
    former = None if out is None else removable(open_store(out))  # raises here, before hours of training
    check_class(pretrained.folder, pretrained.name)
    pieces = open_pieces(pretrained.folder, open_config(pretrained.folder), settings.max_length)
    kind = kind_of(task, pieces, settings)
    examples = read_splits(task)
    splits = {name: _prepared(kind, name, read) for name, read in examples.items()}
    with ExitStack() as stack:
        start = pretrained
        if task.after is not None:
            start = intermediate or stack.enter_context(
                first_finetuned(pretrained, task, settings, None if scratch is None else scratch / "first")
            )
        digest = digest_of_examples(task, examples)
        kept = stack.enter_context(
            opened_scratch(None if scratch is None else scratch / "this", start, digest, settings, seed)
        )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        stack.enter_context(reproducible(device, settings.threads))
        wanted = HeadSpec(kind.head, kind.outputs, tuple(task.labels))
        network = open_network(start.folder, open_config(start.folder), wanted, settings, seed).to(device)
        outcome = _train(network, kind, task, splits, settings=settings, seed=seed, scratch=kept)
        if out is not None and former is not None:
            provenance = Provenance(pretrained, start, task, digest, settings, seed, outcome)
            with temporary_folder("finetuned") as name:
                write_export(network, name, provenance)
                publish(name, open_store(out), former)
        return outcome


def _prepared(kind: Learnable, name: str, examples: Examples) -> PreparedSplit:
    with work(f"splitting {name} into tokens"):
        return prepare(kind, examples)


def read_splits(task: Task) -> dict[str, Examples]:
    """Read every split, `train` and `dev` first, so that errors in the data show before hours of training.

    Raises TaskError, InputError, StoreError as `Task.read`; also TaskError if a metric is undefined on a split other
    than `train`.
    """
    found = {}
    for split in dict.fromkeys(("train", "dev", *task.splits)):
        with work(f"reading {split}"):
            found[split] = task.read(split)
    for split, examples in found.items():
        if split != "train":
            check_measurable(task, examples, f"the split {split}")
    return found


@contextmanager
def first_finetuned(
    pretrained: LocalModel, task: Task, settings: FinetuneSettings, scratch: Path | None = None
) -> Iterator[LocalModel]:
    """Provide the model fine-tuned on the task that `task` starts after, with the defaults of that task and seed 0. Its
    files exist until the context ends. The settings of the machine (microbatch, precision, threads) are those of
    `settings`.

    Raises TaskMismatch if that task itself starts after another one; other errors as `finetune`.
    """
    assert task.after is not None
    before = load_task(task.after, task.root)
    if before.after is not None:
        raise TaskMismatch(
            f"{task.name} starts after {before.name}, and that after {before.after}",
            remedy="leave out `after` in one of them",
        )
    machine = settings.model_dump(include=MACHINE)
    first = candidates(before.finetune, machine)[0]
    with temporary_folder("first") as name:
        finetune(pretrained, before, first, _FIRST_SEED, str(name), scratch=scratch)
        yield LocalModel(f"{pretrained.name} after {before.name}", None, name, folder_digest(name))


def _train(
    network: TaskNetwork,
    kind: Learnable,
    task: Task,
    splits: Mapping[str, PreparedSplit],
    *,
    settings: FinetuneSettings,
    seed: int,
    scratch: Scratch | None,
) -> FinetuneOutcome:
    """Train, measure and return the outcome. At the end, `network` has the weights of the chosen epoch."""
    rows, optimizer = splits["train"].prepared.rows, make_optimizer(network, settings)
    state = TrainingState() if scratch is None else restore(scratch, network, optimizer)
    begin, each, saving = len(state.losses), updates_each(rows, settings), _Saving()
    if begin:
        _LOG.info("%s: goes on after update %s of %s", task.name, begin, each * settings.epochs)
    updates = train_updates(
        network, kind, kind.pieces, rows, settings=settings, seed=seed, optimizer=optimizer, begin=begin
    )
    while not _is_over(state, each, settings):
        state.losses.append(next(updates))
        ends = len(state.losses) % each == 0
        if ends:
            _end_epoch(state, network, kind, task, splits["dev"], settings=settings, each=each)
        if scratch is not None and (_is_over(state, each, settings) or saving.is_due(ends)):
            with saving.timed():
                save(scratch, network, optimizer, state)
    updates.close()
    assert state.best is not None  # there is at least one epoch
    network.load_state_dict(state.best.weights)
    kept = state.best.scores or _measured(network, kind, task, splits["dev"], settings)
    return FinetuneOutcome(
        metrics=kept.metrics,
        best_epoch=state.best.epoch,
        curves=tuple(state.curves),
        losses=tuple(state.losses),
        predictions=kept.predictions,
        threshold=kept.threshold,
        others={
            name: _measured(network, kind, task, split, settings, kept.threshold).metrics
            for name, split in splits.items()
            if name not in ("train", "dev")
        },
    )


class _Saving:
    """The decision when to save a checkpoint, by the time since the last one and the time that it took."""

    def __init__(self) -> None:
        self._ended, self._took = time.monotonic(), 0.0

    def is_due(self, ends: bool) -> bool:
        """Return whether to save now. `ends`: whether an epoch has just ended."""
        since = time.monotonic() - self._ended
        return since >= _SAVE_S or (ends and since * _SHARE >= self._took)

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._ended = time.monotonic()
        self._took = self._ended - began


def _is_over(state: TrainingState, each: int, settings: FinetuneSettings) -> bool:
    """Return whether training is over: all updates are made, or `patience` epochs have brought no better result."""
    if len(state.losses) % each:
        return False
    tired = settings.patience is not None and len(state.curves) - _best(state.curves) >= settings.patience
    return tired or len(state.losses) == each * settings.epochs


def _end_epoch(
    state: TrainingState,
    network: TaskNetwork,
    kind: Learnable,
    task: Task,
    dev: PreparedSplit,
    *,
    settings: FinetuneSettings,
    each: int,
) -> None:
    measured, epoch = _measured(network, kind, task, dev, settings), len(state.curves) + 1
    state.curves.append(Epoch(epoch, sum(state.losses[-each:]) / each, measured.metrics))
    _tell(task, settings, state.curves[-1])
    if state.best is None or settings.keep == "last" or measured.main > state.best.main:
        state.best = Best(epoch, measured.main, copied(network.state_dict()), measured)


def _tell(task: Task, settings: FinetuneSettings, epoch: Epoch) -> None:
    figures = ", ".join(f"{name} {value:.4f}" for name, value in epoch.metrics.items())
    _LOG.info(
        "%s, epoch %d of %d: loss %.4f; dev %s", task.name, epoch.epoch, settings.epochs, epoch.loss, figures
    )


def _best(curves: list[Epoch]) -> int:
    """Return the number of the first epoch with the best main metric; 0 before the first epoch."""
    return (
        0 if not curves else max(curves, key=lambda one: (next(iter(one.metrics.values())), -one.epoch)).epoch
    )


def _measured(
    network: TaskNetwork,
    kind: Learnable,
    task: Task,
    split: PreparedSplit,
    settings: FinetuneSettings,
    threshold: float | None = None,
) -> SplitScores:
    logits = compute_logits(network, kind.pieces, split.prepared.rows, settings.precision)
    return measure(kind, task, split, logits, max_answer=settings.max_answer, threshold=threshold)
