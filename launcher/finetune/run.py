"""One fine-tuning: a pure function of (weights, task, settings, seed)."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from checkpoints.hf.publish import publish, removable
from data_service.scratch import scratch
from data_service.store.open import open_store
from launcher.finetune.export import Provenance, write_export
from launcher.finetune.inputs import open_pieces
from launcher.finetune.loop import compute_logits, reproducible, train_epochs
from launcher.finetune.measure import Learnable, PreparedSplit, SplitScores, kind_of, measure, prepare
from launcher.finetune.network import HeadSpec, TaskNetwork, open_config, open_network
from launcher.finetune.outcome import Epoch, FinetuneOutcome, TaskMismatch
from launcher.finetune.pretrained import LocalModel, folder_digest
from launcher.finetune.settings import MACHINE, FinetuneSettings, candidates
from launcher.tasks.examples import Examples
from launcher.tasks.metrics import check_measurable
from launcher.tasks.task import Task, digest_of_examples, load_task

_LOG = logging.getLogger("launcher.finetune")
_FIRST_SEED = 0  # of the model that a task starts `after`: one for all seeds of the task, as in the papers


def finetune(
    pretrained: LocalModel,
    task: Task,
    settings: FinetuneSettings,
    seed: int,
    out: str | None = None,
    *,
    intermediate: LocalModel | None = None,
) -> FinetuneOutcome:
    """Fine-tune on the task's `train`, choose the epoch on its `dev`, measure that on its other splits too.

    On one kind of device the same arguments give the same bits, in any process, whatever ran there before. A task that
    starts `after` another begins with the encoder of `intermediate`, which `first_finetuned` makes, or makes it itself.

    Args:
        out: folder or s3:// URI for the kept model, in place of a former export; None: it is not kept.
        intermediate: the model fine-tuned on the task's `after`, for callers that have it.

    Raises:
        TaskMismatch: a checkpoint, a tokenizer, a task and settings that do not fit each other. Diverged.
        TaskError, InputError: the task's data. ExportError: `out` holds something else. StoreError.
        MissingPackage: transformers is not installed.
    """
    former = None if out is None else removable(open_store(out))  # known before hours of training
    pieces = open_pieces(pretrained.folder, open_config(pretrained.folder), settings.max_length)
    kind = kind_of(task, pieces, settings)
    examples = read_splits(task)
    splits = {name: prepare(kind, read) for name, read in examples.items()}
    with ExitStack() as stack:
        start = pretrained
        if task.after is not None:
            start = intermediate or stack.enter_context(first_finetuned(pretrained, task, settings))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        stack.enter_context(reproducible(device, settings.threads))
        wanted = HeadSpec(kind.head, kind.outputs, tuple(task.labels))
        network = open_network(start.folder, open_config(start.folder), wanted, settings, seed).to(device)
        outcome = _train(network, kind, task, splits, settings=settings, seed=seed)
        if out is not None and former is not None:
            digest = digest_of_examples(task, examples)
            provenance = Provenance(pretrained, start, task, digest, settings, seed, outcome)
            with scratch("finetuned") as name:
                write_export(network, name, provenance)
                publish(name, open_store(out), former)
        return outcome


def read_splits(task: Task) -> dict[str, Examples]:
    """Read every split, `train` and `dev` first, so that what is wrong with any of them is known before hours of
    training.

    Raises TaskError, InputError, StoreError: as `Task.read`; or a split other than `train` on which a metric is
    undefined.
    """
    found = {split: task.read(split) for split in dict.fromkeys(("train", "dev", *task.splits))}
    for split, examples in found.items():
        if split != "train":
            check_measurable(task, examples, f"the split {split}")
    return found


@contextmanager
def first_finetuned(pretrained: LocalModel, task: Task, settings: FinetuneSettings) -> Iterator[LocalModel]:
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
    with scratch("first") as name:
        finetune(pretrained, before, first, _FIRST_SEED, str(name))
        yield LocalModel(f"{pretrained.name} after {before.name}", None, name, folder_digest(name))


def _train(
    network: TaskNetwork,
    kind: Learnable,
    task: Task,
    splits: Mapping[str, PreparedSplit],
    *,
    settings: FinetuneSettings,
    seed: int,
) -> FinetuneOutcome:
    """Leaves `network` with the weights of the kept epoch."""
    curves: list[Epoch] = []
    losses: list[float] = []
    kept: tuple[int, SplitScores, Mapping[str, Tensor]] | None = None
    for epoch, updates in enumerate(
        train_epochs(network, kind, kind.pieces, splits["train"].prepared.rows, settings=settings, seed=seed),
        1,
    ):
        measured = _measured(network, kind, task, splits["dev"], settings)
        curves.append(Epoch(epoch, sum(updates) / len(updates), measured.metrics))
        _tell(task, settings, curves[-1])
        losses += updates
        if kept is None or settings.keep == "last" or measured.main > kept[1].main:
            kept = epoch, measured, _copied(network)
        if settings.patience is not None and epoch - _best(curves) >= settings.patience:
            break
    assert kept is not None  # there is at least one epoch
    epoch, measured, weights = kept
    network.load_state_dict(weights)
    return FinetuneOutcome(
        metrics=measured.metrics,
        best_epoch=epoch,
        curves=tuple(curves),
        losses=tuple(losses),
        predictions=measured.predictions,
        threshold=measured.threshold,
        others={
            name: _measured(network, kind, task, split, settings, measured.threshold).metrics
            for name, split in splits.items()
            if name not in ("train", "dev")
        },
    )


def _tell(task: Task, settings: FinetuneSettings, epoch: Epoch) -> None:
    figures = ", ".join(f"{name} {value:.4f}" for name, value in epoch.metrics.items())
    _LOG.info(
        "%s, epoch %d of %d: loss %.4f; dev %s", task.name, epoch.epoch, settings.epochs, epoch.loss, figures
    )


def _best(curves: list[Epoch]) -> int:
    """The first epoch with the best main metric."""
    return max(curves, key=lambda one: (next(iter(one.metrics.values())), -one.epoch)).epoch


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


def _copied(network: TaskNetwork) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in network.state_dict().items()}
