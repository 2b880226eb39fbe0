"""The training loop: a pure function of (weights, rows, settings, seed) on one kind of device. The optimizer is AdamW
with a learning rate for each layer, linear warmup and decay."""

import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from data_service.rng import draws64, stream_key
from launcher.after.finetune.inputs import InputRow, Logits, Pieces, TaskKind
from launcher.after.finetune.network import TaskNetwork, seed_of
from launcher.after.finetune.settings import Diverged, FinetuneSettings
from launcher.progress import counted, work


class _Kept(NamedTuple):
    """The settings of a group of parameters: peak learning rate, and whether weights decay."""

    rate: float
    decays: bool


def make_optimizer(network: TaskNetwork, settings: FinetuneSettings) -> torch.optim.AdamW:
    """Return AdamW over the parameters that learn. Each group's `peak` is its learning rate after the warmup.

    A parameter at depth d of L layers has the rate `lr * layer_decay ** (L + 1 - d)`: the head has `lr`, the top layer
    one factor less, the embeddings the lowest rate. (ELECTRA's code has one factor more below the head.)
    """
    groups: dict[_Kept, list[nn.Parameter]] = {}
    for name, parameter, depth in _learning(network):
        rate = settings.lr * settings.layer_decay ** (network.layout.layers + 1 - depth)
        groups.setdefault(_Kept(rate, _decays(name, parameter)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "lr": kept.rate,
                "peak": kept.rate,
                "weight_decay": settings.weight_decay if kept.decays else 0.0,
            }
            for kept, parameters in groups.items()
        ],
        betas=settings.adam_betas,
        eps=settings.adam_epsilon,
    )


def _learning(network: TaskNetwork) -> Iterator[tuple[str, nn.Parameter, int]]:
    above = network.layout.layers + 1
    depths = {id(p): network.layout.depths[name] for name, p in network.encoder.named_parameters()}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            yield name, parameter, depths.get(id(parameter), above)


def _decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter has weight decay: all but biases (XLNet's are 2-D), norms and mixture weights."""
    return parameter.ndim > 1 and not name.rpartition(".")[2].endswith("bias")


def rate_share(step: int, steps: int, warmup: float) -> float:
    """Return the learning rate at `step` (from 0) of `steps`, as a share of the peak rate. The schedule is
    transformers' linear one with warmup."""
    rising = math.ceil(steps * warmup)
    if step < rising:
        return step / max(1, rising)
    return max(0.0, (steps - step) / max(1, steps - rising))


def set_rate(groups: Iterable[dict[str, object]], share: float) -> None:
    for group in groups:
        peak = group["peak"]
        assert isinstance(peak, float)
        group["lr"] = peak * share


_ROWS_READ = 64  # number of rows in a batch without training


@contextmanager
def reproducible(device: torch.device, threads: int) -> Iterator[None]:
    """Set random state, threads and kernels of torch for a fine-tuning, and restore them after the `with` block."""
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
    """Return the indices of `rows` rows in the order of training, [rows]. The order depends only on (seed, epoch).
    `epoch` counts from 0."""
    return np.argsort(draws64(stream_key("fine-tuning", seed, "order", epoch), 0, rows), kind="stable")


def train_updates(
    network: TaskNetwork,
    kind: TaskKind,
    pieces: Pieces,
    rows: Sequence[InputRow],
    *,
    settings: FinetuneSettings,
    seed: int,
    optimizer: torch.optim.AdamW | None = None,
    begin: int = 0,
) -> Generator[float, None, None]:
    """Train `network` in place. After each update, yield its loss per target.

    The last batch of an epoch may be smaller. Dropout is drawn from (seed, step). With the network and the optimizer as
    they were after `begin` updates, training continues from there.

    Raises Diverged if a loss or a gradient is not finite. The update is not made then.
    """
    optimizer = make_optimizer(network, settings) if optimizer is None else optimizer
    each = updates_each(rows, settings)
    with work("training", each * settings.epochs, "updates") as now:
        now.begin_at(begin)
        for epoch in range(begin // each, settings.epochs):
            order = epoch_order(len(rows), seed, epoch)
            for index in range(begin % each if epoch == begin // each else 0, each):
                step = epoch * each + index
                batch = [rows[i] for i in order[index * settings.batch : (index + 1) * settings.batch]]
                network.train()
                set_rate(optimizer.param_groups, rate_share(step, each * settings.epochs, settings.warmup))
                torch.manual_seed(seed_of(seed, "dropout", step))
                loss = _update(network, kind, pieces, optimizer, batch=batch, settings=settings)
                if not np.isfinite(loss):
                    raise Diverged(
                        f"the loss, or its gradient, is no longer finite in update {step + 1:,} (epoch {epoch + 1})",
                        remedy="lower lr, or lengthen warmup",
                    )
                now.advance()
                now.note = f"loss {loss:.4f}"
                yield loss


def updates_each(rows: Sequence[InputRow], settings: FinetuneSettings) -> int:
    """Return the number of updates of an epoch."""
    return -(-len(rows) // settings.batch)


def _update(
    network: TaskNetwork,
    kind: TaskKind,
    pieces: Pieces,
    optimizer: torch.optim.AdamW,
    *,
    batch: list[InputRow],
    settings: FinetuneSettings,
) -> float:
    """Make one update and return its loss. If the gradient is not finite, make no update and return NaN."""
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
    """Return the logits of each row, [outputs] or [pieces, outputs], without padding. Rows of similar length share a
    batch."""
    network.eval()
    device = next(network.parameters()).device
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    found: list[Logits] = [np.zeros(0, np.float32)] * len(rows)
    groups = [order[start : start + _ROWS_READ] for start in range(0, len(rows), _ROWS_READ)]
    for indices in counted(groups, "measuring", len(rows), "rows", len):
        inputs = pieces.batch([rows[index] for index in indices], device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = network(inputs).cpu().numpy()
        width = inputs["input_ids"].shape[1]
        for index, values in zip(indices, logits, strict=True):
            first = pieces.shift(rows[index], width)
            found[index] = values if values.ndim == 1 else values[first : first + len(rows[index])]
    return found
