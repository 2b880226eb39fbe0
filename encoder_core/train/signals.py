"""The one exchange before each step: target counts, and the flags on which all ranks must act alike."""

from collections.abc import Mapping
from dataclasses import dataclass

from encoder_core.train.control import Control


@dataclass(frozen=True)
class Signals:
    """What all ranks know before a step's first backward.

    Attributes:
        stop: some rank was asked to stop; nobody runs the step.
        save: rank 0 finds a checkpoint due after this step (one clock decides).
        saved: every rank has written its part of the checkpoint under way, well or badly.
        wait: the longest wait for data, seconds.
        tokens: tokens of the global batch.
        digest: sum of the microbatches' checksums, a fingerprint of the bytes trained on.
        counts: targets of the global batch, per loss term.
    """

    stop: bool
    save: bool
    saved: bool
    wait: float
    tokens: int
    digest: int
    counts: dict[str, float]


def exchange(
    control: Control,
    *,
    stop: bool,
    save: bool,
    saved: bool,
    wait: float,
    tokens: int,
    digest: int,
    counts: Mapping[str, int],
) -> Signals:
    """Tell and hear. Collective: every rank calls it once a step, with the same term names in `counts`."""
    names = sorted(counts)
    table = control.table([stop, save, saved, wait, tokens, digest, *(counts[name] for name in names)])
    totals = table.sum(dim=0).tolist()
    return Signals(
        stop=totals[0] > 0,
        save=bool(table[0, 1]),
        saved=int(totals[2]) == control.world,
        wait=float(table[:, 3].max()),
        tokens=int(totals[4]),
        digest=int(totals[5]),
        counts=dict(zip(names, totals[6:], strict=True)),
    )
