"""InfoNCE with the other examples of a batch as negatives: loss and gradient of some of its examples.

The loss of a query q with the positive p among the candidates C is -log(exp(q p / t) / sum over c in C of exp(q c /
t)), with t the temperature (van den Oord et al. 2018, equation 4). C are the positives and hard negatives of all
examples of the batch (Henderson et al. 2017, section 4.4). In both directions it is the mean of that loss and of the
same loss for each positive among all queries (CLIP: Radford et al. 2021, figure 3).

A process has n own examples and the vectors of all N. It computes the losses of its own queries, and the gradients of
the sum of all N losses by its own texts. The gradients need one number for each query of the other processes: the
logarithm of the denominator. So nothing is summed over processes, and results do not depend on their number, up to
rounding. Similarities are computed one chunk of rows at a time and never all stored.

Shapes: n own examples, N all, G texts of an example (query, positive, hard negatives), D width; k rows, C columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from encoder_core.objectives.losses import AllExamples

CHUNK = 2**21  # similarities at a time: 8 MiB in fp32


@dataclass(frozen=True)
class Contrast:
    """Loss and gradient of this process's examples.

    Attributes:
        loss: [n], loss of each example.
        correct: [n] bool, whether the positive is the nearest candidate of the query.
        positive, negative: [n], similarity of the query with its positive, and its mean similarity with all other
            candidates.
        gradient: [n, G, D], gradient of the sum of all N losses.
    """

    loss: Float[Tensor, " own"]
    correct: Tensor
    positive: Float[Tensor, " own"]
    negative: Float[Tensor, " own"]
    gradient: Float[Tensor, "own texts width"]


def info_nce(
    own_nGD: Float[Tensor, "own texts width"],
    all_NGD: Float[Tensor, "all texts width"],
    everyone: AllExamples,
    *,
    temperature: float,
    bidirectional: bool = False,
) -> Contrast:
    """Return loss and gradient in the precision of the vectors, which should be fp32 or wider. Collective.

    The similarity of two texts is the dot product of their vectors. `own_nGD` must be `all_NGD[everyone.at]`. G is at
    least 2; n may be 0.
    """
    at_n, negatives = everyone.at, own_nGD.shape[1] - 1
    queries_nD, queries_ND = own_nGD[:, 0], all_NGD[:, 0]
    candidates_CD = all_NGD[:, 1:].flatten(0, 1)
    ranked = _rank(queries_nD, candidates_CD, at_n * negatives, temperature)
    loss_n, log_sum_N = ranked.loss, everyone.gather(ranked.log_sum)
    # A query is pulled to its positive, and pushed from all candidates; each candidate likewise.
    by_query_nD = _pull(queries_nD, candidates_CD, ranked.log_sum[:, None], at_n * negatives, temperature)
    of_n = torch.full((len(at_n), negatives), -1, device=at_n.device)  # whose positive each candidate is
    of_n[:, 0] = at_n
    own_CD = own_nGD[:, 1:].flatten(0, 1)
    by_candidate_nGD = _pull(own_CD, queries_ND, log_sum_N[None], of_n.flatten(), temperature).view_as(
        own_nGD[:, 1:]
    )
    if bidirectional:
        positives_nD, positives_ND = own_nGD[:, 1], all_NGD[:, 1]
        back = _rank(positives_nD, queries_ND, at_n, temperature)
        loss_n = (loss_n + back.loss) / 2
        by_query_nD += _pull(queries_nD, positives_ND, everyone.gather(back.log_sum)[None], at_n, temperature)
        by_candidate_nGD[:, 0] += _pull(positives_nD, queries_ND, back.log_sum[:, None], at_n, temperature)
        by_query_nD, by_candidate_nGD = by_query_nD / 2, by_candidate_nGD / 2
    gradient_nGD = torch.cat([by_query_nD[:, None], by_candidate_nGD], dim=1)
    return Contrast(loss_n, ranked.correct, ranked.positive, ranked.negative, gradient_nGD)


@dataclass(frozen=True)
class _Ranked:
    """The comparison of rows with all columns, [k] each. `log_sum`: of the exponentials of similarity / temperature."""

    log_sum: Tensor
    loss: Tensor
    correct: Tensor
    positive: Tensor
    negative: Tensor


def _rank(rows_kD: Tensor, columns_CD: Tensor, own_k: Tensor, temperature: float) -> _Ranked:
    """Compare rows with all columns; `own_k` is the column that is the positive of each row."""
    count = len(columns_CD)
    log_sum, loss, positive, negative = (rows_kD.new_empty(len(rows_kD)) for _ in range(4))
    correct = torch.empty_like(own_k, dtype=torch.bool)
    for chunk in _chunks(len(rows_kD), count):
        similarity_cC = rows_kD[chunk] @ columns_CD.t()
        positive[chunk] = similarity_cC.gather(1, own_k[chunk, None]).squeeze(1)
        negative[chunk] = (similarity_cC.sum(1) - positive[chunk]) / max(1, count - 1)
        correct[chunk] = similarity_cC.argmax(1) == own_k[chunk]
        log_sum[chunk] = similarity_cC.div_(temperature).logsumexp(1)
        loss[chunk] = log_sum[chunk] - positive[chunk] / temperature
    return _Ranked(log_sum, loss, correct, positive, negative)


def _pull(
    rows_kD: Tensor, columns_CD: Tensor, log_sum: Tensor, own_k: Tensor, temperature: float
) -> Float[Tensor, "rows width"]:
    """Return [k, D], the gradient by the rows of a sum of losses: ((p - 1 at a row's own column) columns) /
    temperature.

    p is exp(similarity / temperature - `log_sum`), where `log_sum` is [k, 1] if rows choose among columns, and [1, C]
    if columns choose among rows. `own_k` is -1 for a row without a column of its own.
    """
    gradient_kD = torch.empty_like(rows_kD)
    log_sum_kC = log_sum.expand(len(rows_kD), len(columns_CD))
    for chunk in _chunks(len(rows_kD), len(columns_CD)):
        p_cC = (rows_kD[chunk] @ columns_CD.t()).div_(temperature).sub_(log_sum_kC[chunk]).exp_()
        own_c = own_k[chunk]
        row_c = torch.arange(len(own_c), device=own_c.device)
        p_cC[row_c, own_c.clamp(min=0)] -= (own_c >= 0).to(p_cC.dtype)
        gradient_kD[chunk] = p_cC @ columns_CD / temperature
    return gradient_kD


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    size = max(1, CHUNK // max(1, columns))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class _CachedLoss(torch.autograd.Function):
    """A loss that was computed in the first pass, and its gradient by the vectors from which it was computed."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.shape = vectors.shape
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (
            (gradient * grad).reshape(ctx.shape),
            None,
            None,
        )  # an idle microbatch is empty in another shape


cached_loss: Callable[[Tensor, Tensor, Tensor], Tensor] = _CachedLoss.apply
"""(vectors, gradient, loss) -> the loss, whose gradient by the vectors is the cached one."""
