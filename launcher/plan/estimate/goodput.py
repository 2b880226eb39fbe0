"""How often to save, and what failures cost (Young 1974; Daly 2006, "A higher order estimate of the optimum checkpoint
interval for restart dumps").

A save blocks training for `blocked` seconds and is worth something only when it is committed, `behind` seconds later:
what a failure loses is the work since the last commit, so `behind` is lost like the time to restart. Failures are taken
as independent, of constant rate.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Saving:
    """Seconds: training waits, until the commit, and from a failure to the next step."""

    blocked: float
    behind: float
    restart: float


def young(blocked: float, mtbf: float) -> float:
    """sqrt(2 d M)."""
    return math.sqrt(2 * blocked * mtbf)


def daly(blocked: float, mtbf: float) -> float:
    """Daly's estimate, sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2 M, else M."""
    if blocked >= 2 * mtbf:
        return mtbf
    ratio = blocked / (2 * mtbf)
    return young(blocked, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocked


def best_interval(saving: Saving, mtbf: float) -> float:
    """Daly's, but no shorter than a save takes: there is one at a time."""
    return max(daly(saving.blocked, mtbf), saving.behind)


def goodput(saving: Saving, interval: float, mtbf: float) -> float:
    """Share of wall time that ends up in the model, saving after every `interval` seconds of work.

    Daly's complete model: wall time for each interval is M e^(r/M) (e^((t + d)/M) - 1), with r the restart and, for us,
    the time to a commit. Below 1e-9 it is 0.
    """
    lost = (saving.restart + saving.behind) / mtbf
    each = (interval + saving.blocked) / mtbf
    if lost + each > 20:
        return 0.0
    return interval / (mtbf * math.exp(lost) * math.expm1(each))
