"""The one gather after each step: sums of losses, how busy every rank was, and digests of the weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from encoder_core.train.control import Control
from encoder_core.train.pace import Pace
from encoder_core.train.replicas import Digest, halves, whole

_PACE = 3  # columns


@dataclass(frozen=True)
class Settled:
    """What all ranks know after a step.

    Attributes:
        sums: over all ranks, the same bits on each.
        paces: in rank order.
        digests: of the weights, in rank order; all empty if they were not looked at.
    """

    sums: dict[str, float]
    paces: tuple[Pace, ...]
    digests: tuple[Digest, ...]


def settle(control: Control, sums: Mapping[str, float], pace: Pace, digests: Sequence[Tensor]) -> Settled:
    """Tell and hear. Collective: every rank passes the same names, and as many digests."""
    names = sorted(sums)
    row = [*(sums[name] for name in names), pace.data, pace.forward, pace.tokens, *halves(digests)]
    table = control.table(row)
    totals, rest = table[:, : len(names)].sum(dim=0).tolist(), table[:, len(names) :].tolist()
    return Settled(
        sums=dict(zip(names, totals, strict=True)),
        paces=tuple(
            Pace(data, forward, int(tokens)) for data, forward, tokens in (row[:_PACE] for row in rest)
        ),
        digests=tuple(whole(row[_PACE:]) for row in rest),
    )
