"""The training loop: a pure function of (weights, rows, settings, seed) on one kind of device."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from data_service.rng import draws64, stream_key
from launcher.finetune.inputs import InputRow, Pieces
from launcher.finetune.kind import Logits, TaskKind
from launcher.finetune.network import TaskNetwork, seed_of
from launcher.finetune.optimizer import make_optimizer, rate_share, set_rate
from launcher.finetune.outcome import Diverged
from launcher.finetune.settings import FinetuneSettings

_log = logging.getLogger(__name__)

_FIRST_S, _EVERY_S = 3.0, 10.0  # when people are told how far it is

_ROWS_READ = 64  # rows at a time where nothing is learnt


@contextmanager
def reproducible(device: torch.device, threads: int) -> Iterator[None]:
    """Random state, threads and kernels of torch as a fine-tuning needs them; as they were afterwards."""
    before, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        torch.set_num_threads(threads)
        if on_gpu:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.set_num_threads(before)
            torch.use_deterministic_algorithms(strict, warn_only=warned)


def epoch_order(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """[rows] indices in the order of training, a function of (seed, epoch) alone. `epoch` from 0."""
    return np.argsort(draws64(stream_key("fine-tuning", seed, "order", epoch), 0, rows), kind="stable")


def train_epochs(
    network: TaskNetwork,
    kind: TaskKind,
    pieces: Pieces,
    rows: Sequence[InputRow],
    *,
    settings: FinetuneSettings,
    seed: int,
) -> Iterator[list[float]]:
    """Trains `network` in place; after each epoch the loss per target of each update.

    The last batch of an epoch may be smaller. Dropout is drawn from (seed, step).

    Raises Diverged: a loss or a gradient is not finite. The update was not made.
    """
    optimizer, pace = make_optimizer(network, settings), _Pace()
    steps_each = -(-len(rows) // settings.batch)
    for epoch in range(settings.epochs):
        order = epoch_order(len(rows), seed, epoch)
        losses = []
        network.train()
        for index in range(steps_each):
            step = epoch * steps_each + index
            batch = [rows[i] for i in order[index * settings.batch : (index + 1) * settings.batch]]
            set_rate(optimizer.param_groups, rate_share(step, steps_each * settings.epochs, settings.warmup))
            torch.manual_seed(seed_of(seed, "dropout", step))
            losses.append(_update(network, kind, pieces, optimizer, batch=batch, settings=settings))
            if not np.isfinite(losses[-1]):
                raise Diverged(
                    f"the loss, or its gradient, is no longer finite in update {step + 1:,} (epoch {epoch + 1})",
                    remedy="lower lr, or lengthen warmup",
                )
            pace.made(step + 1, steps_each * settings.epochs, losses[-1])
        yield losses


class _Pace:
    """Says every few seconds how far the updates are, and how long the rest takes at their pace."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + _FIRST_S

    def made(self, step: int, steps: int, loss: float) -> None:
        now = time.monotonic()
        if now >= self._next and step < steps:
            left = (now - self._began) / step * (steps - step)
            _log.info("update %s of %s, loss %.4f; about %.0f s left", f"{step:,}", f"{steps:,}", loss, left)
            self._next = now + _EVERY_S


def _update(
    network: TaskNetwork,
    kind: TaskKind,
    pieces: Pieces,
    optimizer: torch.optim.AdamW,
    *,
    batch: list[InputRow],
    settings: FinetuneSettings,
) -> float:
    """One update, which is not made if its gradient is not finite. Returns the loss, then not finite either."""
    device = next(network.parameters()).device
    optimizer.zero_grad()
    total, count = 0.0, max(1, kind.count(batch))
    size = settings.microbatch or len(batch)
    for start in range(0, len(batch), size):
        part = batch[start : start + size]
        inputs = pieces.batch(part, device)
        targets = kind.targets(part, inputs["input_ids"].shape[1]).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            logits = network(inputs)
        loss = kind.loss(logits, targets) / count
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), settings.clip)
    if not torch.isfinite(norm):
        return float("nan")
    optimizer.step()
    return total


@torch.inference_mode()
def compute_logits(
    network: TaskNetwork, pieces: Pieces, rows: Sequence[InputRow], precision: str = "fp32"
) -> list[Logits]:
    """Of each row [outputs], or [pieces, outputs], without padding. Rows of like length share a batch."""
    network.eval()
    device = next(network.parameters()).device
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    found: list[Logits] = [np.zeros(0, np.float32)] * len(rows)
    for start in range(0, len(rows), _ROWS_READ):
        indices = order[start : start + _ROWS_READ]
        inputs = pieces.batch([rows[index] for index in indices], device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = network(inputs).cpu().numpy()
        width = inputs["input_ids"].shape[1]
        for index, values in zip(indices, logits, strict=True):
            first = pieces.shift(rows[index], width)
            found[index] = values if values.ndim == 1 else values[first : first + len(rows[index])]
    return found
