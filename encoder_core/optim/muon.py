"""Muon (Jordan et al. 2024) as in Moonlight (Liu et al. 2025, arXiv 2502.16982): orthogonalised momentum.

The momentum of each hidden matrix is orthogonalised before it is applied. The same optimizer updates everything else
(embeddings, norms, biases, heads) with AdamW. If several matrices are joined in one parameter (query, key and value;
the halves of a gated block), each is orthogonalised by itself.

The Newton-Schulz iteration orthogonalises a matrix with products alone. For M = U S V^T it gives approximately U V^T:
singular values above 0.002 of M's Frobenius norm become 0.68 to 1.21, which works as well as 1 would
(kellerjordan.github.io/posts/muon). Smaller ones become smaller.

The iteration needs the whole matrix. At ZeRO stage 0 every rank computes all matrices. At the other stages every rank
holds one range of each matrix, in the order of ranks (`table`). One rank gathers and orthogonalises the matrix, and
every rank gets its own range of the result. Each rank derives from the table which rank that is, without messages. A
rank that holds much of a matrix is preferred, because it receives least; if all hold equally much, as at stage 3, the
work is distributed evenly.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from encoder_core.errors import TrainingError
from encoder_core.layers.parameters import JoinedLayout
from encoder_core.layers.torch_internals import add_to_each, copy_to_each, multiply_each, norm_of_each, sum_of_each
from encoder_core.optim.adamw import update_adamw
from encoder_core.optim.settings import MuonConfig
from encoder_core.optim.shards import ShardedOptimizer, ShardSegment
from encoder_core.optim.updates import group_defaults, next_update_number, tensors_to_update

NEWTON_SCHULZ_STEPS = 5  # number of iterations
# Published coefficients (Jordan et al. 2024): small singular values grow fast, but end only near 1, not at 1.
_LINEAR, _CUBIC, _QUINTIC = (
    3.4445,
    -4.7750,
    2.0315,
)
_NORM_EPSILON = 1e-7  # added to the norm, so that a matrix of zeros stays zero


def working_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the iteration: bfloat16 on a GPU, as published, for its tensor cores; float32 on a CPU.

    CPU tests compare ZeRO stages and world sizes to the last digits, and a CPU may have no bfloat16 units.
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def rms_scale(rows: int, columns: int) -> float:
    """Return 0.2 sqrt(max(rows, columns)), which scales an orthogonal update to the usual RMS of AdamW's updates.

    So Muon can use AdamW's learning rate and weight decay (Liu et al. 2025, arXiv 2502.16982, section 2.2).
    """
    return 0.2 * math.sqrt(max(rows, columns))


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a parameter as a matrix: (first dimension, product of the others)."""
    return shape[0], math.prod(shape[1:])


def matrix_shapes(shape: Sequence[int], joined: JoinedLayout | None) -> list[tuple[int, int]]:
    """Return (rows, columns) of every matrix in a parameter of this shape. `joined` None: the parameter is one."""
    rows, columns = rows_and_columns(shape)
    return [(rows, columns)] if joined is None else [(joined.times * part, columns) for part in joined.rows]


def orthogonalise_each(momenta: Iterable[tuple[Float[Tensor, "rows columns"], JoinedLayout | None]]) -> None:
    """Orthogonalise and scale momenta in place. Matrices whose shorter sides are equal share kernel launches.

    If a parameter joins several matrices, each is orthogonalised by itself: singular vectors of the joined matrix would
    mix them.
    """
    alike: dict[int, list[Tensor]] = {}
    for whole, joined in momenta:
        for part in (joined or JoinedLayout((len(whole),))).views(whole):
            alike.setdefault(min(_matrix_sides(part.shape)), []).append(part)
    for parts in alike.values():
        parts.sort(key=lambda part: (max(_matrix_sides(part.shape)), part.shape))
        stacks = _newton_schulz(_normalise_and_stack(parts))
        multiply_each(stacks, [rms_scale(*x.shape[1:]) for x in stacks])
        copy_to_each(parts, _unstack_in_order(stacks, parts))


def _matrix_sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of the matrix whose view (`JoinedLayout.views`) has this shape, [times, rows, columns]."""
    return shape[0] * shape[1], shape[2]


def _normalise_and_stack(parts: Sequence[Float[Tensor, "_ _ _"]]) -> list[Float[Tensor, "_ short _"]]:
    """Divide matrices by their norms, and stack those whose longer sides are equally long, in the order of `parts`.
    Matrices with more rows than columns are transposed. All have the same shorter side.

    All matrices are copied into one tensor, end to end along their longer sides, so that one kernel copies and one
    divides. Norms are computed in the parameters' own layout: summing in another order would round differently.
    """
    lengths = [max(_matrix_sides(part.shape)) for part in parts]
    upright = [
        part if len(part) * part.shape[1] == long else part.flatten(0, 1).mT[None]
        for part, long in zip(parts, lengths, strict=True)
    ]
    tall = torch.cat([piece for its in upright for piece in its])
    copies = zip(upright, torch.split(tall, lengths), strict=True)
    norms = norm_of_each([copy if len(its) > 1 else its for its, copy in copies])
    rows = [norm.expand(length, 1) for norm, length in zip(norms, lengths, strict=True)]
    tall /= torch.cat(rows).add_(_NORM_EPSILON)
    counts, short = Counter(lengths), tall.shape[1]
    ranges = torch.split(tall, [long * count for long, count in counts.items()])
    stacks = [its.view(-1, long, short) for long, its in zip(counts, ranges, strict=True)]
    return [x.mT if x.shape[1] > short else x for x in stacks]


def _newton_schulz(stacks: Sequence[Float[Tensor, "_ short _"]]) -> Sequence[Float[Tensor, "_ short _"]]:
    """Return stacks of approximately U V^T for each matrix U S V^T, contiguous."""
    for _ in range(NEWTON_SCHULZ_STEPS):
        stacks = [
            torch.baddbmm(x, its, x, beta=_LINEAR) for x, its in zip(stacks, _gram_polynomials(stacks), strict=True)
        ]
    return stacks


def _gram_polynomials(
    stacks: Sequence[Float[Tensor, "_ short _"]],
) -> Sequence[Float[Tensor, "_ short short"]]:
    """Return b G + c G^2 for each matrix's Gram matrix G, with the cubic and quintic coefficients b and c."""
    counts, short = [len(x) for x in stacks], stacks[0].shape[1]
    gram = stacks[0].new_empty(sum(counts), short, short)
    for x, its in zip(stacks, torch.split(gram, counts), strict=True):
        torch.bmm(x, x.mT, out=its)
    return torch.split(torch.baddbmm(gram, gram, gram, beta=_CUBIC, alpha=_QUINTIC), counts)


def _unstack_in_order(stacks: Sequence[Float[Tensor, "_ short _"]], parts: Sequence[Tensor]) -> list[Tensor]:
    """Undo `_normalise_and_stack`: return the stacks' matrices in the order of `parts`, with the shapes of `parts`."""
    shapes, found = Counter(part.shape for part in parts), list[Tensor]()
    for x in stacks:
        its = [shape for shape in shapes if max(_matrix_sides(shape)) == x.shape[2]]
        for shape, same in zip(its, torch.split(x, [shapes[shape] for shape in its]), strict=True):
            rows, columns = _matrix_sides(shape)
            found += (same.mT.contiguous() if rows > columns else same).view(-1, *shape).unbind()
    return found


def flops(shape: tuple[int, int]) -> int:
    """Return the number of floating-point operations of the iteration for one matrix."""
    rows, columns = shape
    short, long = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4 * short * short * long + 2 * short**3)


ROUND_ELEMENTS = 2**27
"""Largest number of elements of the matrices that a rank gathers in one round; a larger matrix has its own round."""

Round = tuple[tuple[int, ...], ...]
"""The matrices that are gathered at the same time: for each rank, the numbers of the matrices that it gathers."""


@dataclass(frozen=True)
class MatrixExchange:
    """Gathers sharded matrices on single ranks and scatters the results.

    Attributes:
        table: for each matrix by its number, how many of its elements each rank holds.
        rank: index of this rank.
        ranks: process group of the ranks; None: the default group (a single rank needs none).
    """

    table: Mapping[int, Sequence[int]]
    rank: int = 0
    ranks: dist.ProcessGroup | None = None

    def plan_rounds(self, cost_by_matrix: Mapping[int, int]) -> list[Round]:
        """Assign every matrix of `cost_by_matrix` (FLOPs by matrix number) to a rank and a round.

        The rank holds at least half as much of the matrix as any other. A rank's costly matrices come first, so that
        ranks seldom wait for each other.
        """
        owned: dict[int, list[int]] = {rank: [] for matrix in cost_by_matrix for rank in range(len(self.table[matrix]))}
        load = dict.fromkeys(owned, 0)
        for matrix, cost in cost_by_matrix.items():
            held = self.table[matrix]
            able = [rank for rank, length in enumerate(held) if 2 * length >= max(held)]
            owner = min(able, key=lambda rank: load[rank])
            owned[owner].append(matrix)
            load[owner] += cost
        ordered = (sorted(its, key=lambda matrix: -cost_by_matrix[matrix]) for its in owned.values())
        return list(zip_longest(*map(self._split_into_rounds, ordered), fillvalue=()))

    def gather(self, matrices: Round, own_ranges: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return this rank's matrices of the round, whole and flattened. A matrix that this rank holds whole is not
        copied. Collective, unless every matrix is held whole by the rank that gathers it.

        `own_ranges`: this rank's range of each matrix of the round.
        """
        own, moved = matrices[self.rank], self._matrices_to_move(matrices)
        wholes = {matrix: own_ranges[matrix] for matrix in own}
        if any(moved):
            its = moved[self.rank]
            lengths = [[self.table[matrix][rank] for matrix in its] for rank in range(len(matrices))]
            sent = [[own_ranges[matrix] for matrix in theirs] for theirs in moved]
            received = self._exchange(sent, lengths, nothing := next(iter(own_ranges.values()))[:0])
            joined = torch.cat([nothing, *(part for parts in zip(*received, strict=True) for part in parts)])
            sizes = [sum(self.table[matrix]) for matrix in its]
            wholes |= zip(its, torch.split(joined, sizes), strict=True)
        return wholes

    def scatter(self, matrices: Round, wholes: Mapping[int, Tensor], own_ranges: Mapping[int, Tensor]) -> None:
        """Copy the whole matrices, which the caller has changed, back into each rank's `own_ranges`; see `gather`."""
        moved = self._matrices_to_move(matrices)
        if any(moved):
            cut = [torch.split(wholes[matrix], list(self.table[matrix])) for matrix in moved[self.rank]]
            lengths = [[self.table[matrix][self.rank] for matrix in its] for its in moved]
            sent = [[parts[rank] for parts in cut] for rank in range(len(matrices))]
            received = self._exchange(sent, lengths, next(iter(own_ranges.values()))[:0])
            ranges = [own_ranges[matrix] for its in moved for matrix in its]
            copy_to_each(ranges, [part for its in received for part in its])

    def _split_into_rounds(self, matrices: Sequence[int]) -> list[tuple[int, ...]]:
        """Cut the list of a rank's matrices into rounds of at most `ROUND_ELEMENTS` elements."""
        chunks: list[tuple[int, ...]] = []
        free = 0
        for matrix in matrices:
            size = sum(self.table[matrix])
            if size > free:
                chunks.append(())
                free = ROUND_ELEMENTS
            chunks[-1] += (matrix,)
            free -= size
        return chunks

    def _matrices_to_move(self, matrices: Round) -> Round:
        """Return the round without the matrices that the gathering rank already holds whole."""
        return tuple(
            tuple(matrix for matrix in its if self.table[matrix][rank] < sum(self.table[matrix]))
            for rank, its in enumerate(matrices)
        )

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], lengths: list[list[int]], empty: Tensor
    ) -> list[Sequence[Tensor]]:
        """Send the tensors `sent[r]` to each rank r. Return, for each rank r, the tensors received from it, which have
        the lengths `lengths[r]`. `empty`: an empty tensor of the right dtype, in case this rank sends nothing.
        """
        totals = [sum(its) for its in lengths]
        joined = torch.cat([empty, *(part for its in sent for part in its)])
        received = joined.new_empty(sum(totals))
        dist.all_to_all_single(received, joined, totals, [sum(map(len, its)) for its in sent], group=self.ranks)
        return [torch.split(part, its) for part, its in zip(torch.split(received, totals), lengths, strict=True)]


def create_exchange(
    ranges: Mapping[int, tuple[int, int]],
    shapes: Sequence[tuple[int, ...]],
    ranks: dist.ProcessGroup | None,
    device: torch.device,
) -> MatrixExchange:
    """Gather every rank's ranges, and return the exchange for parameters of these `shapes`. Collective.

    `ranges`: (first element, length) of this rank's range of a parameter, by parameter number.

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
                f"parameter {parameter} of shape {shapes[parameter]} is split into {its} (first element, length) over "
                "the ranks, but Muon needs one range on each rank, in the order of ranks",
                remedy="install the DeepSpeed version of pyproject.toml; this one shards parameters in another order",
            )
    table = {parameter: [length for _, length in its] for parameter, its in enumerate(held)}
    return MatrixExchange(table, dist.get_rank(ranks), ranks)


MATRICES_KEY = "matrices"
"""Key of a parameter group: true if Muon updates its parameters (hidden matrices), false if AdamW does."""
JOINED_KEY = "joined"
"""Key of a parameter group: how each parameter joins several matrices (`JoinedLayout`); None: it is one matrix."""
MOMENTUM = "momentum"
"""Name of the only state of a hidden matrix, which replaces AdamW's two moments."""


class Muon(ShardedOptimizer):
    """Muon for hidden matrices, AdamW for all other parameters. A hidden matrix W with gradient G is updated by

        B = mu B + G;   O = NewtonSchulz(G + mu B);   W = (1 - lr wd) W - 0.2 sqrt(max(rows, columns)) lr O

    Groups with `matrices` true hold hidden matrices. A parameter with more than two dimensions counts as the matrix
    [first dimension, product of the others]. If the group's `joined` is set, W joins several matrices, and the formula
    is applied to each. Other groups are updated by AdamW, with bias correction. State of a hidden matrix: `momentum`,
    of W's shape; of other tensors as in `AdamW`. If tensors are ZeRO's partitions, call `shard` to name the parameters
    that they hold.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], config: MuonConfig) -> None:
        own = {"momentum": config.momentum, MATRICES_KEY: False, JOINED_KEY: None}
        super().__init__(params, group_defaults(config, bias_correction=True) | own)
        self._exchange = MatrixExchange({number: [p.numel()] for number, p in enumerate(self._segments)})

    def shard(
        self,
        segments: Mapping[Tensor, Sequence[ShardSegment]],
        shapes: Sequence[tuple[int, ...]],
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """Do what `ShardedOptimizer.shard` does, and prepare the exchange of matrices. Collective.

        Raises:
            TrainingError: the ranges of a parameter do not follow each other in the order of ranks.
        """
        super().shard(segments, shapes, ranks)
        ranges = {s.parameter: (s.first, s.stop - s.start) for its in segments.values() for s in its}
        self._exchange = create_exchange(ranges, shapes, ranks, next(iter(segments)).device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        matrices: dict[Tensor, dict[str, Any]] = {}
        for group in self.param_groups:
            params = tensors_to_update(group)
            if params and group[MATRICES_KEY]:
                next_update_number(group)  # raises an error if the number was not set
                matrices |= dict.fromkeys(params, group)
        update_adamw(self.state, [group for group in self.param_groups if not group[MATRICES_KEY]])
        if matrices:
            self._update_matrices(matrices)

    def _update_matrices(self, groups: Mapping[Tensor, dict[str, Any]]) -> None:
        """Update hidden matrices; `groups` maps each tensor to its parameter group. Matrices of all groups are
        orthogonalised together, to save kernel launches."""
        directions = dict(zip(groups, self._directions(groups), strict=True))
        ranges = {s.parameter: s.view_in(directions[p]) for p in groups for s in self._segments_in(p)}
        joined = {s.parameter: group[JOINED_KEY] for p, group in groups.items() for s in self._segments_in(p)}
        work = {number: sum(map(flops, matrix_shapes(self._shapes[number], joined[number]))) for number in ranges}
        for matrices in self._exchange.plan_rounds(work):
            wholes = self._exchange.gather(matrices, ranges)
            orthogonalise_each(
                (flat.view(rows_and_columns(self._shapes[number])), joined[number]) for number, flat in wholes.items()
            )
            self._exchange.scatter(matrices, wholes, ranges)
        for rate in {group["lr"] for group in groups.values()}:
            its = [p for p, group in groups.items() if group["lr"] == rate]
            add_to_each(its, [directions[p] for p in its], -rate)

    def _directions(self, groups: Mapping[Tensor, dict[str, Any]]) -> list[Tensor]:
        """Apply weight decay, update momenta, and return G + mu B (see `Muon`) of each tensor, in `working_dtype`.

        Rounding before the gather halves the traffic; the published code rounds the same numbers after gathering.
        """
        params, mu = list(groups), self.defaults[MOMENTUM]
        gradients = [p.grad for p in params if p.grad is not None]
        for p in params:
            if MOMENTUM not in self.state[p]:
                self.state[p][MOMENTUM] = torch.zeros_like(p)
        momenta = [self.state[p][MOMENTUM] for p in params]
        kept = [1 - group["lr"] * group["weight_decay"] for group in groups.values()]
        multiply_each([*params, *momenta], kept + [mu] * len(momenta))
        add_to_each(momenta, gradients, 1.0)
        dtype = working_dtype(params[0].device)
        if all(p.dtype == dtype for p in params):
            return sum_of_each(gradients, momenta, mu)
        pairs = zip(gradients, momenta, strict=True)
        return [torch.add(g, m, alpha=mu, out=torch.empty_like(m, dtype=dtype)) for g, m in pairs]
