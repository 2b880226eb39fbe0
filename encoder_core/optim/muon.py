"""Muon (Jordan et al. 2024) as in Moonlight (Liu et al. 2025, arXiv 2502.16982): the momentum of each hidden matrix is
made orthogonal before it is applied. Everything else (embeddings, norms, biases, heads) is AdamW's, in the same
optimizer. Where several matrices lie in one parameter (query, key and value; the halves of a gated block), each is made
orthogonal by itself.

A matrix must be whole to be orthogonalised. Under ZeRO each is made whole on one rank, and every rank gets its own
range of the result (`encoder_core.optim.matrix_exchange`). At stage 0 every rank does all of them alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from encoder_core.optim.adamw import Beta, Decayed, update_adamw
from encoder_core.optim.matrix_exchange import MatrixExchange, Round, meet
from encoder_core.optim.newton_schulz import flops, parts_of, rows_and_columns, update_of, working_dtype
from encoder_core.optim.shards import ShardedOptimizer, ShardSegment
from encoder_core.optim.updates import ACTIVE, LR_SCALE, UPDATE, due, update_count

MATRICES = "matrices"
"""The key of a parameter group that says whether it holds hidden matrices, which Muon moves, or others."""
JOINED = "joined"
"""The key of such a group that says how several matrices lie in each of its parameters (`Joined`); None: one."""
MOMENTUM = "momentum"
"""The name of a hidden matrix's only state, in place of AdamW's two moments."""


class MuonConfig(BaseModel):
    """Settings of Muon; the defaults are Moonlight's (MoonshotAI/Moonlight, examples/toy_train.py).

    Attributes:
        lr: peak learning rate of all parameters, as for AdamW; the schedule scales it.
        momentum: decay of the sum of gradients of a hidden matrix.
        betas: AdamW's, of the other parameters: decay of the first and second moment.
        eps: AdamW's: added to the root of the second moment.
        weight_decay: decoupled, times the learning rate; of all parameters that decay.
        decayed: the parameters it acts on.
        clip: the gradient's global norm is cut to this before the update; null for no clipping. It changes how much a
            step counts in the momentum, not how far a matrix moves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(gt=0.0)
    momentum: Beta = 0.95
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.1, ge=0.0)
    decayed: Decayed = "no_bias_norm"
    clip: float | None = Field(default=1.0, gt=0.0)


class Muon(ShardedOptimizer):
    """Of a hidden matrix W with gradient G:

        B = mu B + G;   O = NewtonSchulz(G + mu B);   W = (1 - lr wd) W - 0.2 sqrt(max(rows, columns)) lr O

    Groups with `matrices` true hold those; a parameter of more dimensions is the matrix of its first by all others.
    Where the group's `joined` says that W is several matrices, NewtonSchulz, rows and columns are of each. Other groups
    are AdamW's, with bias correction. State of a hidden matrix: `momentum`, of W's shape; of others as in `AdamW`.
    Where tensors are ZeRO's partitions, `shard` must say what lies in them.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], config: MuonConfig) -> None:
        defaults = {
            "lr": config.lr,
            "momentum": config.momentum,
            "betas": config.betas,
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "bias_correction": True,
            MATRICES: False,
            JOINED: None,
            LR_SCALE: 1.0,
            UPDATE: 0,
            ACTIVE: True,
        }
        super().__init__(params, defaults)
        self._exchange = MatrixExchange({number: [p.numel()] for number, p in enumerate(self._segments)})

    def shard(
        self,
        segments: Mapping[Tensor, Sequence[ShardSegment]],
        shapes: Sequence[tuple[int, ...]],
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """As `ShardedOptimizer.shard`. Raises TrainingError: a parameter does not lie in the order of ranks."""
        super().shard(segments, shapes, ranks)
        ranges = {s.parameter: (s.first, s.stop - s.start) for its in segments.values() for s in its}
        self._exchange = meet(ranges, shapes, ranks, next(iter(segments)).device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update to every tensor of the active update group that has a gradient. Sharded, all ranks call it
        together.

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
            assert gradient is not None  # `due` keeps only those with one
            if MOMENTUM not in self.state[p]:
                self.state[p][MOMENTUM] = torch.zeros_like(p)
            self.state[p][MOMENTUM].mul_(group["momentum"]).add_(gradient)
            p.mul_(1 - group["lr"] * group["weight_decay"])
        # Each tensor is one matrix where nothing is sharded. So what belongs together is all ranges of all tensors.
        ranges = {segment.parameter: (segment, p) for p in params for segment in self._ranges(p)}
        work = {number: sum(map(flops, parts_of(self._shapes[number], group[JOINED]))) for number in ranges}
        for matrices in self._exchange.rounds(work):
            self._update_round(group, matrices, ranges)

    def _update_round(
        self, group: dict[str, Any], matrices: Round, ranges: Mapping[int, tuple[ShardSegment, Tensor]]
    ) -> None:
        """One parameter a rank: whole, orthogonal, and back. No more than that is in memory at a time."""
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
        """This rank's range of G + mu B, flat, as Newton-Schulz takes it. Rounded before it is sent: the published code
        rounds the same numbers once they are together."""
        assert p.grad is not None
        momentum = segment.of(self.state[p][MOMENTUM])
        direction = segment.of(p.grad).add(momentum, alpha=group["momentum"])
        return direction.to(working_dtype(p.device))
