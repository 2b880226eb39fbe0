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
from launcher.after.finetune.pretrained import LocalModel, folder_digest
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
_SAVE_S = 300.0  # between checkpoints inside an epoch
_SHARE = 0.05  # of the time that goes into checkpoints after epochs, which may be shorter than saving one
_FIRST_SEED = 0  # of the model that a task starts `after`: one for all seeds of the task, as in the papers


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
    """Fine-tune on the task's `train`, choose the epoch on its `dev`, measure that on its other splits too.

    On one kind of device the same arguments give the same bits, in any process, whatever ran there before. A task that
    starts `after` another begins with the encoder of `intermediate`, which `first_finetuned` makes, or makes it itself.

    Args:
        out: folder or s3:// URI for the kept model, in place of a former export; None: it is not kept.
        intermediate: the model fine-tuned on the task's `after`, for callers that have it.
        scratch: folder of this machine that keeps checkpoints, from which the same fine-tuning, ended, goes on to the
            same bits; None: it can only begin again. The caller removes it when the result is safe.

    Raises:
        TaskMismatch: a checkpoint, a tokenizer, a task and settings that do not fit each other. Diverged.
        TaskError, InputError: the task's data. ExportError: `out` holds something else. StoreError.
        MissingPackage: transformers is not installed.
    """
    former = None if out is None else removable(open_store(out))  # known before hours of training
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
    """Read every split, `train` and `dev` first, so that what is wrong with any of them is known before hours of
    training.

    Raises TaskError, InputError, StoreError: as `Task.read`; or a split other than `train` on which a metric is
    undefined.
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
    """The model fine-tuned on the task that `task` starts after, with that task's own defaults and seed 0; its files
    stay until the context ends. What is of the machine (microbatch, precision, threads) is as in `settings`.

    Raises TaskMismatch: that task starts after another one itself. Else as `finetune`.
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
    """Leaves `network` with the weights of the kept epoch."""
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
    """When a checkpoint is worth its time."""

    def __init__(self) -> None:
        self._ended, self._took = time.monotonic(), 0.0

    def is_due(self, ends: bool) -> bool:
        """`ends`: an epoch does."""
        since = time.monotonic() - self._ended
        return since >= _SAVE_S or (ends and since * _SHARE >= self._took)

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._ended = time.monotonic()
        self._took = self._ended - began


def _is_over(state: TrainingState, each: int, settings: FinetuneSettings) -> bool:
    """Return whether no update follows: all are made, or `patience` is at its end."""
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
    """Return the first epoch with the best main metric; 0 before any."""
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
