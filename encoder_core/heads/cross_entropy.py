"""Softmax cross-entropy over a large vocabulary, which never holds all logits in memory.

The logits of one chunk of targets at a time are computed, and turned into losses and, if needed, into their gradient in
the same buffer. The peak memory is one chunk of logits instead of four arrays of [targets, vocabulary].

On a GPU the vocabulary is padded during the computation, because tensor cores need multiples of 64, unlike 50,265 or
30,522. The added ids have probability 0 and no gradient.

| kernel    | where                                         | how                                               |
|-----------|-----------------------------------------------|---------------------------------------------------|
| `fused`   | CUDA with Triton, if a trial found it correct | reads logits once, overwrites them with gradients |
| `written` | everywhere                                    | torch operations, on a copy of the logits in fp32 |

`fused` is `encoder_core/kernels/softmax_loss.py`, which a trial (`encoder_core/trials`) checks before training. Both
kernels sample ids with torch operations.

Shapes: M targets, c of them in a chunk, E width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from encoder_core.layers.gpu_attention import has_triton
from encoder_core.layers.kernel_choice import pick
from encoder_core.layers.sizes import CHUNK_LOGITS
from encoder_core.random_draws import draw_key, uniforms

VOCAB_MULTIPLES = {"cuda": 64, "meta": 64, "cpu": 1}  # padding multiple of the vocabulary, by device
SAMPLING_GROUP_SIZE = 256  # number of ids of a group: sampling first draws a group, then an id of the group
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that the fused kernel supports


class CrossEntropySums(NamedTuple):
    """Sums over targets: the loss (fp32 or wider), and the number of correct predictions (int64).

    `sampled`: an id drawn for each target; None without a temperature.
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
    weights: Float[Tensor, " targets"] | None = None,
) -> CrossEntropySums:
    """Return sums over targets of -log softmax(logits)[id] and of argmax == id, where logits = features weight' + bias.

    With a temperature, an id is also sampled for each target from softmax(logits / temperature). M may be 0.

    Args:
        keys: key of each target, from which the uniform numbers for sampling are hashed (`random_draws.py`).
        weights: factor of each target's loss; gets no gradient.
    """
    draws = features.new_zeros(0) if keys is None else uniforms(keys, draw_key(), 2)
    loss_sum, correct, sampled = _apply(
        features, weight, bias, ids, temperature, draws, weights, torch.is_grad_enabled()
    )
    return CrossEntropySums(loss_sum, correct, None if temperature is None else sampled)


class _LinearCrossEntropy(torch.autograd.Function):
    """The autograd function of `linear_cross_entropy`, which computes gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float | None,
        draws: Tensor,
        weights: Tensor | None,
        wants_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(features.dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=wide, device=features.device)
        correct = torch.zeros((), dtype=torch.int64, device=features.device)
        sampled = torch.empty_like(ids)
        unpadded, owns_bias = len(weight), bias is not None
        weight, bias = pad_vocabulary(weight, bias)
        gradients = ChunkGradients(features, weight, bias, wide) if wants_gradient else None
        scores = _score_class(features)
        for chunk in logit_chunks(len(ids), weight.shape[0], weight.device):
            scored = scores(F.linear(features[chunk], weight, bias), ids[chunk])
            factors_c = None if weights is None else weights[chunk].to(wide)
            loss_sum += (scored.losses_c if factors_c is None else scored.losses_c * factors_c).sum()
            correct += scored.correct_c.sum()
            if temperature is not None:
                sampled[chunk] = _sample(scored.log_p_cV()[:, :unpadded], draws[chunk], temperature)
            if gradients is not None:
                d_cV, by_bias_V = scored.overwrite_with_gradient(biased=bias is not None and factors_c is None)
                gradients.add(chunk, d_cV if factors_c is None else d_cV.mul_(factors_c[:, None]), by_bias_V)
        if gradients is not None:
            by_bias = gradients.bias[:unpadded] if owns_bias and gradients.bias is not None else None
            ctx.save_for_backward(gradients.features, gradients.weight[:unpadded], by_bias)
            ctx.dtypes = features.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(correct, sampled)
        return loss_sum, correct, sampled

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None, None, None, None, None]:
        return *multiply_saved(ctx, grad), None, None, None, None, None


_apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _LinearCrossEntropy.apply


def _score_class(features: Tensor) -> "type[_PlainScores | _FusedScores]":
    """Return the class that computes losses with the chosen kernel, fused or written."""
    if _supports(features) and pick(["fused", "written"], dropped=False, place="loss") == "fused":
        return _FusedScores
    return _PlainScores


def _supports(features: Tensor) -> bool:
    """Return whether the fused kernel supports features of this device and dtype."""
    return (
        features.device.type == "cuda"
        and not torch.compiler.is_compiling()
        and features.dtype in _DTYPES
        and has_triton()
    )


class _PlainScores:
    """The losses and predictions of a chunk of logits, computed by torch operations.

    `overwrite_with_gradient` returns the gradient of the logits, in place, and the gradient of the bias if the kernel
    computes it, else None.
    """

    def __init__(self, logits_cV: Tensor, ids_c: Tensor) -> None:
        wide = torch.promote_types(logits_cV.dtype, torch.float32)
        self._log_p_cV, self._ids_c = logits_cV.to(wide).log_softmax(-1), ids_c
        self.losses_c = -self._log_p_cV.gather(1, ids_c[:, None]).squeeze(1)
        self.correct_c = self._log_p_cV.argmax(-1) == ids_c

    def log_p_cV(self) -> Tensor:
        return self._log_p_cV

    def overwrite_with_gradient(self, *, biased: bool) -> tuple[Tensor, None]:
        p_cV = self._log_p_cV.exp_()
        p_cV[torch.arange(len(p_cV), device=p_cV.device), self._ids_c] -= 1.0  # softmax - onehot
        return p_cV, None


class _FusedScores:
    """The losses and predictions of a chunk of logits, as in `_PlainScores`, computed by our Triton kernels."""

    def __init__(self, logits_cV: Tensor, ids_c: Tensor) -> None:
        from encoder_core.kernels.softmax_loss import softmax_sums

        self._logits_cV, self._ids_c = logits_cV, ids_c
        self._sums = softmax_sums(logits_cV, ids_c)
        self.losses_c, self.correct_c = self._sums.losses, self._sums.correct

    def log_p_cV(self) -> Tensor:
        sums = self._sums
        wide_cV = self._logits_cV.to(sums.losses.dtype, copy=True)
        return wide_cV.sub_(sums.largest[:, None]).sub_(sums.log_sums[:, None])

    def overwrite_with_gradient(self, *, biased: bool) -> tuple[Tensor, Tensor | None]:
        from encoder_core.kernels.softmax_loss import overwrite_with_gradient

        return self._logits_cV, overwrite_with_gradient(self._logits_cV, self._ids_c, self._sums, biased=biased)


def pad_vocabulary(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pad weight and bias to a multiple of `VOCAB_MULTIPLES` rows. The added rows have a bias of -inf.

    Both are returned unchanged if the vocabulary is such a multiple already.
    """
    missing = -len(weight) % VOCAB_MULTIPLES.get(weight.device.type, 1)
    if not missing:
        return weight, bias
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing), value=float("-inf"))


def _sample(log_p_cV: Tensor, draws_c2: Tensor, temperature: float) -> Tensor:
    """Sample [c] ids in two steps: first a group of `SAMPLING_GROUP_SIZE` ids, then an id of the group.

    The ids are in the vocabulary even if the logits are not finite: such a step is skipped later, and must not crash.
    """
    p_cV = log_p_cV.exp() if temperature == 1.0 else (log_p_cV / temperature).softmax(-1)
    vocab = p_cV.shape[1]
    whole = vocab // SAMPLING_GROUP_SIZE
    sums = [
        p_cV[:, : whole * SAMPLING_GROUP_SIZE].view(len(p_cV), whole, SAMPLING_GROUP_SIZE).sum(-1),
        p_cV[:, whole * SAMPLING_GROUP_SIZE :].sum(-1, True),
    ]
    group_c1 = _invert_cumulative(torch.cat(sums, -1), draws_c2[:, :1])
    ids_cG = group_c1 * SAMPLING_GROUP_SIZE + torch.arange(SAMPLING_GROUP_SIZE, device=p_cV.device)
    members_cG = p_cV.gather(1, ids_cG.clamp(max=vocab - 1)).masked_fill(ids_cG >= vocab, 0.0)
    sampled_c1 = group_c1 * SAMPLING_GROUP_SIZE + _invert_cumulative(members_cG, draws_c2[:, 1:])
    return sampled_c1.squeeze(-1).clamp(max=vocab - 1)


def _invert_cumulative(weights: Tensor, draw_c1: Tensor) -> Tensor:
    """Return [c, 1], the first index whose cumulative weight exceeds draw * total.

    Weights are accumulated as integers, whose sums are the same in any order, because torch has no deterministic
    cumulative sum of floats on a GPU.
    """
    cumulated = (weights / weights.sum(-1, keepdim=True) * 2.0**40).long().cumsum(-1)
    return torch.searchsorted(cumulated, (draw_c1 * cumulated[:, -1:]).long(), right=True)


class ChunkGradients:
    """Accumulates the gradients of features [M, E], weight [V, E] and bias [V] over chunks. The gradients of weight and
    bias are in fp32 or wider."""

    def __init__(self, features: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> None:
        self._inputs = features, weight
        self.features = torch.empty_like(features)
        # True: the first chunk overwrites uninitialised gradients, to save zeroing them; false: chunks add to zeros.
        self._overwrites_first = bool(len(features)) and features.dtype == wide
        self.weight = (torch.empty_like if self._overwrites_first else torch.zeros_like)(weight, dtype=wide)
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=wide)

    def add(
        self,
        chunk: slice,
        d_cV: Float[Tensor, "chunk vocab"],
        by_bias_V: Float[Tensor, " vocab"] | None = None,
    ) -> None:
        """Add a chunk, given the gradient `d_cV` of its logits. `by_bias_V`: sum of `d_cV` over targets, if known."""
        features, weight = self._inputs
        if self.bias is not None:
            self.bias += d_cV.sum(0) if by_bias_V is None else by_bias_V
        d_cV = d_cV.to(features.dtype)
        self.features[chunk] = d_cV @ weight
        if self._overwrites_first:
            self.weight.addmm_(d_cV.t(), features[chunk], beta=float(chunk.start > 0))
        else:
            self.weight += d_cV.t() @ features[chunk]


def multiply_saved(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the saved gradients of features, weight and bias, times `grad` and in `ctx.dtypes`.

    They are multiplied in place, since the weight's gradient may be a step's largest array. Autograd runs this once.
    """
    features, weight, bias = (
        None if saved is None else saved.mul_(grad).to(dtype)
        for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    )
    assert features is not None
    assert weight is not None
    return features, weight, bias


def logit_chunks(count: int, vocab: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of `count` rows of logits, each with at most `CHUNK_LOGITS` logits or with a single row.

    Chunks are large on a GPU, because each chunk adds to the gradient of the whole decoder.
    """
    rows = max(1, CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cpu"]) // vocab)
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))
