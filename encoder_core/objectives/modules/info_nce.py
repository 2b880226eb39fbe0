"""InfoNCE with in-batch negatives: loss and gradient of a process's examples in a batch of several processes.

The loss of a query q with the positive p among the candidates C is -log(exp(q p / t) / sum over c in C of exp(q c /
t)), with t the temperature (van den Oord et al. 2018, equation 4). C are the positives and hard negatives of all
examples of the batch (Henderson et al. 2017, section 4.4). The bidirectional loss is the mean of this loss and of the
same loss for each positive among all queries (CLIP: Radford et al. 2021, figure 3).

Texts repeat in real data, and a right answer must not count as a negative. So the denominator of query q_i excludes a
candidate c other than its own p_i if c's text equals q_i or p_i, or if c is the positive of a query equal to q_i. The
other direction excludes the same pairs.

A process has n own examples and the vectors of all N. It computes the losses of its own queries, and for its own texts
the gradients of the sum of all N losses. For these it needs one number for each query of the other processes, the
logarithm of the denominator. So nothing is summed over processes, and results do not depend on their number, up to
rounding. Similarities are computed for one chunk of rows at a time, and never all stored.

Shapes: n own examples, N all, G texts of an example (query, positive, hard negatives), D width; k rows (c in a chunk),
C columns. A text has 2 numbers: its own, and its partner's. A query and its positive are partners; others have none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from encoder_core.objectives.modules.losses import AllExamples

CHUNK_SIMILARITIES = 2**21  # largest number of similarities in memory at a time: 8 MiB in fp32
_NO_PARTNER_TEXT = -1  # partner number of a hard negative, which has no partner


@dataclass(frozen=True)
class Contrast:
    """Loss and gradient of this process's examples.

    Attributes:
        loss: [n], loss of each example.
        correct: [n] bool, whether the query's nearest candidate is its positive.
        positive: [n], similarity of the query with its positive.
        negative: [n], mean similarity of the query with its negatives.
        gradient: [n, G, D], gradient of the sum of all N losses with respect to the own vectors.
    """

    loss: Float[Tensor, " own"]
    correct: Tensor
    positive: Float[Tensor, " own"]
    negative: Float[Tensor, " own"]
    gradient: Float[Tensor, "own texts width"]


def info_nce(
    own_nGD: Float[Tensor, "own texts width"],
    all_NGD: Float[Tensor, "all texts width"],
    examples: AllExamples,
    *,
    texts_NG: Int[Tensor, "all texts"],
    temperature: float,
    bidirectional: bool = False,
) -> Contrast:
    """Return loss and gradient in the precision of the vectors, which should be fp32 or wider. Collective.

    The similarity of two texts is the dot product of their vectors. `own_nGD` must be `all_NGD[examples.at]`. G is at
    least 2; n may be 0. `texts_NG`: number, from 0, of each text; equal texts have equal numbers.
    """
    at_n, negatives = examples.at, own_nGD.shape[1] - 1
    with_partners_NG2 = _add_partner_numbers(texts_NG)
    every, own = _Texts(all_NGD, with_partners_NG2), _Texts(own_nGD, with_partners_NG2[at_n])
    queries, candidates, all_queries = own.select(0), every.select(slice(1, None)), every.select(0)
    ranked = _compare(queries, candidates, at_n * negatives, temperature)
    loss_n, log_sum_N = ranked.loss, examples.gather(ranked.log_sum)
    # Gradients of the own queries, then of the own candidates (positives and hard negatives).
    by_query_nD = _gradient(queries, candidates, ranked.log_sum[:, None], at_n * negatives, temperature)
    # For each own candidate, the index of the query whose positive it is; -1 for hard negatives.
    of_n = torch.full((len(at_n), negatives), -1, device=at_n.device)
    of_n[:, 0] = at_n
    by_candidate_nGD = _gradient(
        own.select(slice(1, None)), all_queries, log_sum_N[None], of_n.flatten(), temperature
    ).view_as(own_nGD[:, 1:])
    if bidirectional:
        positives, found = own.select(1), every.select(1)
        back = _compare(positives, all_queries, at_n, temperature)
        loss_n = (loss_n + back.loss) / 2
        by_query_nD += _gradient(queries, found, examples.gather(back.log_sum)[None], at_n, temperature)
        by_candidate_nGD[:, 0] += _gradient(positives, all_queries, back.log_sum[:, None], at_n, temperature)
        by_query_nD, by_candidate_nGD = by_query_nD / 2, by_candidate_nGD / 2
    gradient_nGD = torch.cat([by_query_nD[:, None], by_candidate_nGD], dim=1)
    return Contrast(loss_n, ranked.correct, ranked.positive, ranked.negative, gradient_nGD)


@dataclass(frozen=True)
class _Texts:
    """Vectors [..., D] of texts, and numbers [..., 2] of the texts and their partners (see the module)."""

    vectors: Tensor
    numbers: Tensor

    def select(self, place: int | slice) -> "_Texts":
        """Return as one list the texts at position `place` of each example: 0 query, 1 positive, then negatives."""
        return _Texts(*(x[:, place].reshape(-1, x.shape[-1]) for x in (self.vectors, self.numbers)))

    def similarities(self, chunk: slice, columns: "_Texts", own_k: Tensor) -> tuple[Tensor, Bool[Tensor, "c C"]]:
        """Return similarities of a chunk of rows with all columns, and the excluded pairs. `own_k`: see `_gradient`."""
        of_c2, of_C2, own_c = self.numbers[chunk, None], columns.numbers, own_k[chunk, None]
        left_out_cC = of_c2[..., 0] == of_C2[:, 0]
        left_out_cC |= of_c2[..., 0] == of_C2[:, 1]
        left_out_cC |= of_c2[..., 1] == of_C2[:, 0]
        at_c = own_c.clamp(min=0)  # the row's own partner, which is never excluded
        left_out_cC.scatter_(1, at_c, left_out_cC.gather(1, at_c) & (own_c < 0))
        return self.vectors[chunk] @ columns.vectors.t(), left_out_cC


def _add_partner_numbers(texts_NG: Int[Tensor, "all texts"]) -> Int[Tensor, "all texts 2"]:
    """Return each text's number and its partner's number. Queries and positives have partners, hard negatives none."""
    partners_NG = torch.full_like(texts_NG, _NO_PARTNER_TEXT)
    partners_NG[:, :2] = texts_NG[:, :2].flip(1)
    return torch.stack([texts_NG, partners_NG], dim=-1)


@dataclass(frozen=True)
class _Comparison:
    """A comparison of rows with all columns, [k] each. `log_sum`: log of the loss's denominator; rest: `Contrast`."""

    log_sum: Tensor
    loss: Tensor
    correct: Tensor
    positive: Tensor
    negative: Tensor


def _compare(rows: _Texts, columns: _Texts, own_k: Tensor, temperature: float) -> _Comparison:
    """Compare each row with all columns. `own_k`: index of the column that is the row's positive."""
    count, of_rows = len(columns.vectors), rows.vectors
    log_sum, loss, positive, negative = (of_rows.new_empty(len(of_rows)) for _ in range(4))
    correct = torch.empty_like(own_k, dtype=torch.bool)
    for chunk in _chunks(len(of_rows), count):
        similarity_cC, left_out_cC = rows.similarities(chunk, columns, own_k)
        positive[chunk] = similarity_cC.gather(1, own_k[chunk, None]).squeeze(1)
        counted_c = count - 1 - left_out_cC.sum(1)
        total_c = similarity_cC.masked_fill(left_out_cC, 0).sum(1)
        negative[chunk] = (total_c - positive[chunk]) / counted_c.clamp(min=1)
        similarity_cC.masked_fill_(left_out_cC, -torch.inf)
        correct[chunk] = similarity_cC.argmax(1) == own_k[chunk]
        log_sum[chunk] = similarity_cC.div_(temperature).logsumexp(1)
        loss[chunk] = log_sum[chunk] - positive[chunk] / temperature
    return _Comparison(log_sum, loss, correct, positive, negative)


def _gradient(
    rows: _Texts, columns: _Texts, log_sum: Tensor, own_k: Tensor, temperature: float
) -> Float[Tensor, "rows width"]:
    """Return [k, D], the gradient of a sum of losses with respect to the rows: (p - onehot(own_k)) columns /
    temperature.

    p is exp(similarity / temperature - `log_sum`), and 0 for excluded pairs. `log_sum` is [k, 1] if each row has a loss
    over the columns, and [1, C] if each column has a loss over the rows. `own_k`: index of the row's partner among the
    columns; -1 if it has none there.
    """
    of_rows, of_columns = rows.vectors, columns.vectors
    gradient_kD = torch.empty_like(of_rows)
    log_sum_kC = log_sum.expand(len(of_rows), len(of_columns))
    for chunk in _chunks(len(of_rows), len(of_columns)):
        similarity_cC, left_out_cC = rows.similarities(chunk, columns, own_k)
        p_cC = similarity_cC.div_(temperature).sub_(log_sum_kC[chunk]).exp_().masked_fill_(left_out_cC, 0)
        own_c = own_k[chunk]
        row_c = torch.arange(len(own_c), device=own_c.device)
        p_cC[row_c, own_c.clamp(min=0)] -= (own_c >= 0).to(p_cC.dtype)
        gradient_kD[chunk] = p_cC @ of_columns / temperature
    return gradient_kD


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of rows, with at most `CHUNK_SIMILARITIES` similarities each or a single row."""
    size = max(1, CHUNK_SIMILARITIES // max(1, columns))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class _CachedLoss(torch.autograd.Function):
    """Autograd function of a loss that is already known, as is its gradient with respect to the vectors."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.shape = vectors.shape
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # An idle microbatch's empty vectors may have another shape than the empty gradient.
        return (
            (gradient * grad).reshape(ctx.shape),
            None,
            None,
        )


cached_loss: Callable[[Tensor, Tensor, Tensor], Tensor] = _CachedLoss.apply
"""(vectors, gradient, loss) -> `loss`, such that its backward pass gives `gradient` to the vectors."""
