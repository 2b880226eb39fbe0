"""Muon (Jordan et al. 2024) as in Moonlight (Liu et al. 2025, arXiv 2502.16982): orthogonalised momentum.

The momentum of each hidden matrix is orthogonalised before it is applied. The same optimizer updates everything else
(embeddings, norms, biases, heads) with AdamW. If several matrices are joined in one parameter (query, key and value;
the halves of a gated block), each is orthogonalised by itself.

The Newton-Schulz iteration orthogonalises a matrix with products alone. For M = U S V^T it gives approximately U V^T:
singular values above 0.002 of M's Frobenius norm become 0.68 to 1.21, which works as well as 1 would
(kellerjordan.github.io/posts/muon). Smaller ones become smaller.

The iteration needs the whole matrix. At stage 0 every rank computes all matrices. At the other stages every rank
holds one range of each matrix, in the order of ranks (`table`). One rank gathers and orthogonalises the matrix, and
every rank gets its own range of the result. Which rank that is follows from the table, so ranks need not agree on it
by messages. A rank that holds much of a matrix is preferred, because it receives least; if all hold equally much, as
at stage 3, the work is distributed evenly.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from encoder_core.errors import TrainingError
from encoder_core.layers.parameters import Joined
from encoder_core.optim.adamw import update_adamw
from encoder_core.optim.settings import MuonConfig
from encoder_core.optim.shards import ShardedOptimizer, ShardSegment
from encoder_core.optim.updates import due, group_defaults, update_count

STEPS = 5
_LINEAR, _CUBIC, _QUINTIC = (
    3.4445,
    -4.7750,
    2.0315,
)  # published: steep at 0, at the price of ending near 1 only
_TINY = 1e-7  # added to the norm, so that a matrix of zeros stays zero


def working_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the iteration: bfloat16 on a GPU, as published, for its tensor cores; float32 on a CPU.

    On a CPU, ZeRO stages and topologies are compared to the last digits, and there may be no bfloat16 units.
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return approximately U V^T, [rows, columns], in the dtype of `matrix`, which is not changed."""
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix  # the smaller Gram matrix
    x = wide / (wide.norm() + _TINY)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_CUBIC, alpha=_QUINTIC), x, beta=_LINEAR)
    whole: Tensor = x.mT if wide is not matrix else x
    return whole


def rms_scale(rows: int, columns: int) -> float:
    """Return 0.2 sqrt(max(rows, columns)), which gives an orthogonal update the usual root mean square of AdamW's.

    So AdamW's learning rate and decay fit (Liu et al. 2025, arXiv 2502.16982, section 2.2).
    """
    return 0.2 * math.sqrt(max(rows, columns))


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a parameter as a matrix: its first dimension by the product of the others."""
    return shape[0], math.prod(shape[1:])


def parts_of(shape: Sequence[int], joined: Joined | None) -> list[tuple[int, int]]:
    """Return rows and columns of every matrix in a parameter of this shape."""
    rows, columns = rows_and_columns(shape)
    return [(rows, columns)] if joined is None else [(joined.times * part, columns) for part in joined.rows]


def update_of(matrix: Tensor, joined: Joined | None = None) -> Tensor:
    """Return a momentum as Muon applies it, [rows, columns]: orthogonalised and scaled.

    If `joined`, each matrix in it is treated by itself: singular vectors of the whole would mix its parts.
    """
    if joined is not None:
        return joined.join([update_of(part) for part in joined.split(matrix)])
    return orthogonalise(matrix) * rms_scale(*matrix.shape)


def flops(shape: tuple[int, int]) -> int:
    """Return the floating-point operations of `orthogonalise` for one matrix."""
    rows, columns = shape
    short, long = min(rows, columns), max(rows, columns)
    return STEPS * (4 * short * short * long + 2 * short**3)


Round = tuple[int | None, ...]
"""For each rank, the number of the matrix that it gathers; None for a rank without one."""


@dataclass(frozen=True)
class MatrixExchange:
    """Moves ranges of matrices between ranks.

    Attributes:
        table: for each matrix by its number, how many of its elements each rank holds.
        rank: index of this rank.
        ranks: process group of the ranks; None for the default group, which is not used if there is one rank.
    """

    table: Mapping[int, Sequence[int]]
    rank: int = 0
    ranks: dist.ProcessGroup | None = None

    def rounds(self, work: Mapping[int, int]) -> list[Round]:
        """Return rounds of all matrices in `work`, one a rank in each round. `work` is the cost of each matrix.

        The largest come first, so that ranks seldom wait for each other.
        """
        owned: dict[int, list[int]] = {rank: [] for matrix in work for rank in range(len(self.table[matrix]))}
        load = dict.fromkeys(owned, 0)
        for matrix, cost in work.items():
            held = self.table[matrix]
            able = [rank for rank, length in enumerate(held) if 2 * length >= max(held)]
            owner = min(able, key=lambda rank: load[rank])
            owned[owner].append(matrix)
            load[owner] += cost
        return list(zip_longest(*(sorted(its, key=lambda matrix: -work[matrix]) for its in owned.values())))

    def gather(self, matrices: Round, mine: Mapping[int, Tensor]) -> Tensor:
        """Return this rank's matrix of the round, whole and flat; empty if it has none. Collective unless
        `stays(matrices)`.

        `mine`: this rank's range of each matrix of the round.
        """
        own, nothing = matrices[self.rank], next(iter(mine.values())).new_empty(0)
        if self.stays(matrices):
            return nothing if own is None else mine[own]
        sent = [nothing if matrix is None else mine[matrix] for matrix in matrices]
        return self._exchange(sent, self._held(own, matrices))

    def scatter(self, matrices: Round, whole: Tensor) -> dict[int, Tensor]:
        """Return this rank's ranges of all matrices of the round; the inverse of `gather`. Collective unless
        `stays(matrices)`.

        `whole`: this rank's matrix, flat.
        """
        own = matrices[self.rank]
        if self.stays(matrices):
            return {} if own is None else {own: whole}
        lengths = [0 if matrix is None else self.table[matrix][self.rank] for matrix in matrices]
        parts = torch.split(self._exchange(torch.split(whole, self._held(own, matrices)), lengths), lengths)
        return {matrix: part for matrix, part in zip(matrices, parts, strict=True) if matrix is not None}

    def stays(self, matrices: Round) -> bool:
        """Return whether each matrix of the round is already whole on its rank, so that nothing is sent."""
        return all(
            matrix is None or self.table[matrix][rank] == sum(self.table[matrix])
            for rank, matrix in enumerate(matrices)
        )

    def _held(self, matrix: int | None, matrices: Round) -> list[int]:
        """Return how much of a matrix each rank holds."""
        return [0] * len(matrices) if matrix is None else list(self.table[matrix])

    def _exchange(self, sent: Sequence[Tensor], lengths: list[int]) -> Tensor:
        """Send `sent[r]` to each rank r; return what each rank sent, `lengths[r]` elements of it, end to end."""
        joined = torch.cat(tuple(sent))
        received = joined.new_empty(sum(lengths))
        dist.all_to_all_single(received, joined, lengths, [len(part) for part in sent], group=self.ranks)
        return received


def meet(
    ranges: Mapping[int, tuple[int, int]],
    shapes: Sequence[tuple[int, ...]],
    ranks: dist.ProcessGroup | None,
    device: torch.device,
) -> MatrixExchange:
    """Return the exchange for ranks that hold parameters of these `shapes`. Collective.

    `ranges` are this rank's: the first element and the length, by parameter number.

    Raises:
        TrainingError: the ranges of a parameter do not follow each other in the order of ranks.
    """
    mine = torch.zeros(len(shapes), 2, dtype=torch.int64, device=device)
    for parameter, found in ranges.items():
        mine[parameter] = torch.tensor(found, device=device)
    tables = [torch.empty_like(mine) for _ in range(dist.get_world_size(ranks))]
    dist.all_gather(tables, mine, group=ranks)
    held = torch.stack(tables, dim=1).tolist()
    for parameter, its in enumerate(held):
        begins = accumulate((length for _, length in its), initial=0)
        if any(length and first != begin for (first, length), begin in zip(its, begins, strict=False)):
            raise TrainingError(
                f"parameter {parameter} of shape {shapes[parameter]} lies on the ranks as {its} (first element, "
                "length), which is not one range a rank in the order of ranks",
                remedy="this DeepSpeed shards matrices in another order than Muon needs: use that of pyproject.toml",
            )
    table = {parameter: [length for _, length in its] for parameter, its in enumerate(held)}
    return MatrixExchange(table, dist.get_rank(ranks), ranks)


MATRICES = "matrices"
"""Key of a parameter group: whether it holds hidden matrices, which Muon updates, or other parameters."""
JOINED = "joined"
"""Key of such a group: how several matrices are joined in each of its parameters (`Joined`); None: there is one."""
MOMENTUM = "momentum"
"""Name of the only state of a hidden matrix, which replaces AdamW's two moments."""


class Muon(ShardedOptimizer):
    """The optimizer. A hidden matrix W with gradient G is updated by

        B = mu B + G;   O = NewtonSchulz(G + mu B);   W = (1 - lr wd) W - 0.2 sqrt(max(rows, columns)) lr O

    Groups with `matrices` true hold such matrices; a parameter of more dimensions is the matrix of its first by all
    others. If the group's `joined` says that W is several matrices, NewtonSchulz, rows and columns are those of each.
    Other groups are updated by AdamW, with bias correction. State of a hidden matrix: `momentum`, of W's shape; of
    others as in `AdamW`. If tensors are ZeRO's partitions, `shard` must say which parameters they hold.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], config: MuonConfig) -> None:
        own = {"momentum": config.momentum, MATRICES: False, JOINED: None}
        super().__init__(params, group_defaults(config, bias_correction=True) | own)
        self._exchange = MatrixExchange({number: [p.numel()] for number, p in enumerate(self._segments)})

    def shard(
        self,
        segments: Mapping[Tensor, Sequence[ShardSegment]],
        shapes: Sequence[tuple[int, ...]],
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """Describe the flat tensors as `ShardedOptimizer.shard` does.

        Raises:
            TrainingError: the ranges of a parameter do not lie in the order of ranks.
        """
        super().shard(segments, shapes, ranks)
        ranges = {s.parameter: (s.first, s.stop - s.start) for its in segments.values() for s in its}
        self._exchange = meet(ranges, shapes, ranks, next(iter(segments)).device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update to every tensor of the active update group that has a gradient. If sharded, all ranks must
        call it.

        Raises:
            TrainingError: the update's number was not set, or a flat tensor was not described by `shard`.
        """
        for group in self.param_groups:
            params = due(group)
            if params and group[MATRICES]:
                self._update_matrices(group, params)
            elif params:
                update_adamw(self.state, group, params)

    def _update_matrices(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        update_count(group)
        for p in params:
            gradient = p.grad
            assert gradient is not None  # `due` keeps only tensors with a gradient
            if MOMENTUM not in self.state[p]:
                self.state[p][MOMENTUM] = torch.zeros_like(p)
            self.state[p][MOMENTUM].mul_(group["momentum"]).add_(gradient)
            p.mul_(1 - group["lr"] * group["weight_decay"])
        # Unsharded tensors are one matrix each, so rounds are planned over the ranges of all tensors together.
        ranges = {segment.parameter: (segment, p) for p in params for segment in self._ranges(p)}
        work = {number: sum(map(flops, parts_of(self._shapes[number], group[JOINED]))) for number in ranges}
        for matrices in self._exchange.rounds(work):
            self._update_round(group, matrices, ranges)

    def _update_round(
        self, group: dict[str, Any], matrices: Round, ranges: Mapping[int, tuple[ShardSegment, Tensor]]
    ) -> None:
        """Gather, orthogonalise and scatter one parameter a rank. No more than that is in memory at a time."""
        mine = {n: self._direction(group, *ranges[n]) for n in matrices if n is not None}
        found = self._exchange.gather(matrices, mine)
        own = matrices[self._exchange.rank]
        if own is not None:
            whole = found.view(rows_and_columns(self._shapes[own]))
            found = update_of(whole, group[JOINED]).reshape(-1)
        for number, part in self._exchange.scatter(matrices, found).items():
            segment, p = ranges[number]
            segment.of(p).add_(part, alpha=-group["lr"])

    def _direction(self, group: dict[str, Any], segment: ShardSegment, p: Tensor) -> Tensor:
        """Return this rank's range of G + mu B, flat, as input of Newton-Schulz.

        It is rounded before it is sent; the published code rounds the same numbers after gathering them.
        """
        assert p.grad is not None
        momentum = segment.of(self.state[p][MOMENTUM])
        direction = segment.of(p.grad).add(momentum, alpha=group["momentum"])
        return direction.to(working_dtype(p.device))
