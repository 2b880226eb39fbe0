"""Distillation losses between a student and its teachers: of distributions over the vocabulary, and of last states.

Distributions: the Kullback-Leibler divergence of the student's distribution from the mean of the teachers', both
softened by a temperature (Hinton et al. 2015, section 2; DistilBERT: Sanh et al. 2019, section 3). The gradient of the
student's weights equals that of the cross-entropy with soft targets, but the loss is 0 if the student equals its
teachers. As in these papers the loss is multiplied by the square of the temperature, so that gradients do not shrink
as the temperature grows.

The logits of student and teachers are computed one chunk at a time, and turned into the loss and, if needed, into the
gradient. The peak memory is a few chunks, for any number of tokens.

Shapes: M tokens, c of them in a chunk, E width of a network, V vocabulary, H hidden.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from encoder_core.heads.cross_entropy import ChunkGradients, logit_chunks, multiply_saved

LIVE_LOGIT_ARRAYS = 2
"""Number of logit arrays in memory at a time: the student's and a teacher's. A plain cross-entropy has one."""


class LogitFactors(NamedTuple):
    """The factors of the logits features weight' + bias, which are not computed as a whole; `bias` may be None."""

    features: Float[Tensor, "tokens width"]
    weight: Float[Tensor, "vocab width"]
    bias: Float[Tensor, " vocab"] | None


class DistillationSums(NamedTuple):
    """Sums over tokens: the loss (fp32 or wider), and the number of tokens for which student and teachers predict the
    same id (int64)."""

    loss_sum: Float[Tensor, ""]
    agreeing: Int[Tensor, ""]


def linear_distillation(
    student: LogitFactors, teachers: Sequence[LogitFactors], temperature: float
) -> DistillationSums:
    """Return sums over tokens of T^2 KL(p || q), where q = softmax(student / T) and p is the mean of softmax(teacher
    / T).

    Only the student's factors get gradients. M may be 0; there must be at least one teacher.
    """
    loss_sum, agreeing = _apply(*student, tuple(teachers), temperature, torch.is_grad_enabled())
    return DistillationSums(loss_sum, agreeing)


def cosine_distances(
    student_MH: Float[Tensor, "tokens hidden"], teacher_MH: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, ""]:
    """Return the sum over tokens of 1 - cos(student, teacher), in fp32 or wider (DistilBERT, section 3)."""
    wide = torch.promote_types(student_MH.dtype, torch.float32)
    cosines = F.cosine_similarity(student_MH.to(wide), teacher_MH.detach().to(wide), dim=-1, eps=1e-8)
    return (1.0 - cosines).sum()


class _LinearDistillation(torch.autograd.Function):
    """The autograd function of `linear_distillation`, which computes gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teachers: tuple[LogitFactors, ...],
        temperature: float,
        wants_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(features.dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=wide, device=features.device)
        agreeing = torch.zeros((), dtype=torch.int64, device=features.device)
        student = LogitFactors(features, weight, bias)
        gradients = ChunkGradients(*student, wide) if wants_gradient else None
        for chunk in logit_chunks(len(features), LIVE_LOGIT_ARRAYS * weight.shape[0], weight.device):
            p_cV = _mean_softmax(teachers, chunk, temperature, wide)
            log_q_cV = _softened_logits(student, chunk, temperature, wide).log_softmax(-1)
            agreeing += (log_q_cV.argmax(-1) == p_cV.argmax(-1)).sum()
            loss_sum += temperature**2 * F.kl_div(log_q_cV, p_cV, reduction="sum")
            if gradients is not None:
                gradients.add(chunk, log_q_cV.exp_().sub_(p_cV).mul_(temperature))
        if gradients is not None:
            ctx.save_for_backward(gradients.features, gradients.weight, gradients.bias)
            ctx.dtypes = features.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(agreeing)
        return loss_sum, agreeing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        return *multiply_saved(ctx, grad), None, None, None


_apply: Callable[..., tuple[Tensor, Tensor]] = _LinearDistillation.apply


def _softened_logits(scores: LogitFactors, chunk: slice, temperature: float, wide: torch.dtype) -> Tensor:
    """Return a chunk's logits divided by the temperature, [c, V]."""
    logits_cV = F.linear(scores.features[chunk], scores.weight, scores.bias)
    return logits_cV.to(wide).div_(temperature)


def _mean_softmax(teachers: Sequence[LogitFactors], chunk: slice, temperature: float, wide: torch.dtype) -> Tensor:
    """Return the mean of the teachers' softened distributions, [c, V]."""
    first, *others = teachers
    p_cV = _softened_logits(first, chunk, temperature, wide).softmax(-1)
    for teacher in others:
        p_cV += _softened_logits(teacher, chunk, temperature, wide).softmax(-1)
    return p_cV.div_(len(teachers)) if others else p_cV
