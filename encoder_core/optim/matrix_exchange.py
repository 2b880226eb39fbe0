"""Matrices that ZeRO cut between ranks, each made whole on one rank and given back.

Of each matrix every rank holds one range, in the order of ranks (`table`). Which rank makes which whole is a function
of that table, so no rank need ask. One that holds much of a matrix is preferred, since it receives least; where all
hold alike, as at stage 3, the work is dealt out evenly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from encoder_core.errors import TrainingError

Round = tuple[int | None, ...]
"""By rank, the matrix that it makes whole, by number; None for a rank that has no more."""


@dataclass(frozen=True)
class MatrixExchange:
    """Moves ranges of matrices between ranks.

    Attributes:
        table: for each matrix by its number, how many of its elements each rank holds.
        rank: which of them this is.
        ranks: their process group; None for the default group, which is not used if there is one rank.
    """

    table: Mapping[int, Sequence[int]]
    rank: int = 0
    ranks: dist.ProcessGroup | None = None

    def rounds(self, work: Mapping[int, int]) -> list[Round]:
        """All matrices of `work`, which says what each costs, one a rank in each round; the largest first, so that
        ranks seldom wait for each other."""
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
        """This rank's matrix of the round, whole and flat; empty for None. Collective unless `stays(matrices)`.

        `mine`: of each matrix of the round, the range that this rank holds.
        """
        own, nothing = matrices[self.rank], next(iter(mine.values())).new_empty(0)
        if self.stays(matrices):
            return nothing if own is None else mine[own]
        sent = [nothing if matrix is None else mine[matrix] for matrix in matrices]
        return self._exchange(sent, self._held(own, matrices))

    def scatter(self, matrices: Round, whole: Tensor) -> dict[int, Tensor]:
        """The inverse: this rank's ranges of all matrices of the round. Collective unless `stays(matrices)`.

        `whole`: this rank's matrix, flat.
        """
        own = matrices[self.rank]
        if self.stays(matrices):
            return {} if own is None else {own: whole}
        lengths = [0 if matrix is None else self.table[matrix][self.rank] for matrix in matrices]
        parts = torch.split(self._exchange(torch.split(whole, self._held(own, matrices)), lengths), lengths)
        return {matrix: part for matrix, part in zip(matrices, parts, strict=True) if matrix is not None}

    def stays(self, matrices: Round) -> bool:
        """Whether each matrix of the round lies whole on its rank already, so that nothing is sent."""
        return all(
            matrix is None or self.table[matrix][rank] == sum(self.table[matrix])
            for rank, matrix in enumerate(matrices)
        )

    def _held(self, matrix: int | None, matrices: Round) -> list[int]:
        """By rank, how much of a matrix it holds."""
        return [0] * len(matrices) if matrix is None else list(self.table[matrix])

    def _exchange(self, sent: Sequence[Tensor], lengths: list[int]) -> Tensor:
        """`sent[r]` to each rank r; what each has sent, `lengths[r]` elements of it, end to end."""
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
    """The exchange of ranks that hold parameters of these `shapes`, of which `ranges` are this rank's: by number, the
    first element and how many. Collective.

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
                remedy="this version of DeepSpeed cuts matrices as Muon does not expect: use that of pyproject.toml",
            )
    table = {parameter: [length for _, length in its] for parameter, its in enumerate(held)}
    return MatrixExchange(table, dist.get_rank(ranks), ranks)
