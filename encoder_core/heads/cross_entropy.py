"""Softmax cross-entropy over a large vocabulary without ever holding all logits.

A chunk of targets at a time is scored, turned into its loss and, where gradients are wanted, straight into
its gradient, in the same buffer. The peak is one chunk of logits instead of four arrays of [targets,
vocabulary].

On a GPU the vocabulary is rounded up, in computation only: its tensor cores want multiples of theirs, and 50,265 or
30,522 are none. What is added is never likely, and has no gradient.

Shapes: M targets, c of them in a chunk, E width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from encoder_core.draws import draw_key, uniforms

CHUNKS = {"cuda": 2**27, "cpu": 2**24}  # logits per chunk, by kind of device: 512 and 64 MiB in fp32
MULTIPLES = {"cuda": 64, "cpu": 1}  # of the vocabulary, by kind of device
GROUP = 256  # ids that are sampled from together


class CrossEntropySums(NamedTuple):
    """Sums over targets: of the loss (fp32 or wider) and of predictions equal to the target (int64).

    `sampled` holds an id drawn for each target where one was asked for.
    """

    loss_sum: Float[Tensor, ""]
    correct: Int[Tensor, ""]
    sampled: Int[Tensor, " targets"] | None = None


def linear_cross_entropy(
    features: Float[Tensor, "targets width"],
    weight: Float[Tensor, "vocab width"],
    bias: Float[Tensor, " vocab"] | None,
    ids: Int[Tensor, " targets"],
    *,
    temperature: float | None = None,
    keys: Int[Tensor, " targets"] | None = None,
) -> CrossEntropySums:
    """Sums over targets of -log softmax(logits)[id] and of argmax == id, for logits = features weight' + bias, if there
    is one.

    With a temperature an id is drawn for each target from softmax(logits / temperature), by inversion of uniform
    numbers that belong to the target's key (`encoder_core/draws.py`). M may be 0.
    """
    draws = features.new_zeros(0) if keys is None else uniforms(keys, draw_key(), 2)
    loss_sum, correct, sampled = _apply(
        features, weight, bias, ids, temperature, draws, torch.is_grad_enabled()
    )
    return CrossEntropySums(loss_sum, correct, None if temperature is None else sampled)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float | None,
        draws: Tensor,
        wants_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(features.dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=wide, device=features.device)
        correct = torch.zeros((), dtype=torch.int64, device=features.device)
        sampled = torch.empty_like(ids)
        own, owns_bias = len(weight), bias is not None
        weight, bias = rounded_up(weight, bias)
        gradients = ChunkGradients(features, weight, bias, wide) if wants_gradient else None
        for chunk in chunks(len(ids), weight.shape[0], weight.device):
            log_p_cV = F.linear(features[chunk], weight, bias).to(wide).log_softmax(-1)
            target_c1 = ids[chunk, None]
            loss_sum -= log_p_cV.gather(1, target_c1).sum()
            correct += (log_p_cV.argmax(-1, keepdim=True) == target_c1).sum()
            if temperature is not None:
                sampled[chunk] = _sample(log_p_cV[:, :own], draws[chunk], temperature)
            if gradients is not None:
                gradients.add(chunk, _without_target(log_p_cV.exp_(), target_c1))
        if gradients is not None:
            by_bias = gradients.bias[:own] if owns_bias and gradients.bias is not None else None
            ctx.save_for_backward(gradients.features, gradients.weight[:own], by_bias)
            ctx.dtypes = features.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(correct, sampled)
        return loss_sum, correct, sampled

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None, None, None, None]:
        # In place: the weight's is the largest array of many a step. A second pass is refused by autograd.
        features, weight, bias = (
            None if saved is None else saved.mul_(grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        assert features is not None
        assert weight is not None
        return features, weight, bias, None, None, None, None


_apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _LinearCrossEntropy.apply


def rounded_up(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias with as many more rows as make the vocabulary a multiple; those have a bias of -inf. As they are
    where it is one."""
    missing = -len(weight) % MULTIPLES.get(weight.device.type, 1)
    if not missing:
        return weight, bias
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing), value=float("-inf"))


def _sample(log_p_cV: Tensor, draws_c2: Tensor, temperature: float) -> Tensor:
    """[c] ids by inversion in two steps: which group of `GROUP` ids, then which id of that group.

    Always ids of the vocabulary, even where the logits are not finite: such a step is skipped, not a crash.
    """
    p_cV = log_p_cV.exp() if temperature == 1.0 else (log_p_cV / temperature).softmax(-1)
    vocab = p_cV.shape[1]
    whole = vocab // GROUP
    sums = [
        p_cV[:, : whole * GROUP].view(len(p_cV), whole, GROUP).sum(-1),
        p_cV[:, whole * GROUP :].sum(-1, True),
    ]
    group_c1 = _invert(torch.cat(sums, -1), draws_c2[:, :1])
    ids_cG = group_c1 * GROUP + torch.arange(GROUP, device=p_cV.device)
    members_cG = p_cV.gather(1, ids_cG.clamp(max=vocab - 1)).masked_fill(ids_cG >= vocab, 0.0)
    return (group_c1 * GROUP + _invert(members_cG, draws_c2[:, 1:])).squeeze(-1).clamp(max=vocab - 1)


def _invert(weights: Tensor, draw_c1: Tensor) -> Tensor:
    """[c, 1] the first place whose cumulated weight exceeds draw * total.

    Weights are cumulated as whole numbers, whose sums are the same in any order: torch has no deterministic
    cumulated sum of floats on a GPU.
    """
    cumulated = (weights / weights.sum(-1, keepdim=True) * 2.0**40).long().cumsum(-1)
    return torch.searchsorted(cumulated, (draw_c1 * cumulated[:, -1:]).long(), right=True)


def _without_target(p_cV: Tensor, target_c1: Tensor) -> Tensor:
    """softmax - onehot, in place: the derivative by the logits."""
    p_cV[torch.arange(len(p_cV), device=p_cV.device), target_c1.squeeze(1)] -= 1.0
    return p_cV


class ChunkGradients:
    """Derivatives of a loss sum by features [M, E], weight [V, E] and bias [V], chunk by chunk. Those of weight
    and bias are in fp32 or wider."""

    def __init__(self, features: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> None:
        self._inputs = features, weight
        self.features = torch.empty_like(features)
        # Then the first chunk overwrites what is there.
        self._sums_up = bool(len(features)) and features.dtype == wide
        self.weight = (torch.empty_like if self._sums_up else torch.zeros_like)(weight, dtype=wide)
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=wide)

    def add(self, chunk: slice, d_cV: Float[Tensor, "chunk vocab"]) -> None:
        """Take in the derivative by a chunk's logits."""
        features, weight = self._inputs
        if self.bias is not None:
            self.bias += d_cV.sum(0)
        d_cV = d_cV.to(features.dtype)
        self.features[chunk] = d_cV @ weight
        if self._sums_up:
            self.weight.addmm_(d_cV.t(), features[chunk], beta=float(chunk.start > 0))
        else:
            self.weight += d_cV.t() @ features[chunk]


def chunks(count: int, vocab: int, device: torch.device) -> Iterator[slice]:
    """Of `count` rows of logits, so many at a time that a chunk has at most the device's number of them (`CHUNKS`), and
    one row at least. Few chunks keep a GPU busy, which adds each one's gradient to that of the whole decoder."""
    rows = max(1, CHUNKS.get(device.type, CHUNKS["cpu"]) // vocab)
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))
