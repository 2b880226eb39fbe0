"""Faults drawn from a seed: when, whom, and what.

The seed gives the choices: the moment, whom to strike by preference, the deed. Who is there when the moment comes is
the machine's affair, so a seed repeats the choices, not every microsecond.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tests.support.runs.observer import COMMAND, KINDS
from tests.support.stores.fault_proxy import Fault as StoreFault

_T = TypeVar("_T")
Phase = Literal["imports", "before the first step", "steps", "evaluation", "saving", "ending"]
STARTS: tuple[Phase, ...] = ("imports", "before the first step")
PHASES: tuple[Phase, ...] = ("steps", "evaluation", "saving", *STARTS)
DEEDS = ("TERM", "INT", "HUP", "KILL", "STOP")
GESTURES = (*DEEDS, "INT INT", "INT INT INT", "runs stop")
GROUP, STORE, ANY = "group", "store", "any"
OUTAGES: tuple[StoreFault, ...] = ("error 500", "slow down", "reset")
_DELAYS: dict[Phase, tuple[float, float]] = {
    "imports": (0.0, 3.0),
    "before the first step": (0.0, 4.0),
    "steps": (0.0, 1.0),
    "evaluation": (0.0, 0.05),
    "saving": (0.0, 0.005),
    "ending": (0.0, 2.5),
}  # seconds after the phase was seen to begin


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        phase, step, delay: when: in the first such phase with at least `step` steps done, `delay` seconds into it.
        stage: before the first step: the kind of process that must be there.
        targets: whom, in order of preference: a kind of process, the command, its group, the store; or any process.
        pick: which of several, as a share.
        deed: what is done to a process. To a store: how it fails.
        seconds: of a pause until CONT, of an outage, or between two signals.
    """

    phase: Phase
    step: int
    delay: float
    stage: str
    targets: tuple[str, ...]
    pick: float
    deed: str
    seconds: float


class Draws:
    """Faults in random order, each phase, target and deed about as often as every other."""

    def __init__(self, seed: str, scale: float, *, store: bool) -> None:
        self._random, self._scale = random.Random(seed), scale
        ours = [COMMAND, COMMAND, GROUP, GROUP, "rank", "rank"]
        self._targets = [*ours, *KINDS, ANY, *([STORE] * 6 if store else [])]
        self._decks: dict[Any, list[Any]] = {}

    def faults(self, count: int, steps: int) -> list[Fault]:
        """For a run of so many steps, in the order in which they are to strike: one before the first commit, one at the
        end, the others spread over the steps."""
        phases = [self._next(PHASES) for _ in range(count - 2)]
        phases = [self._next(STARTS), *phases, "ending"][:count]
        places = [int(steps * (number + self._random.random()) / count * 0.9) for number in range(count)]
        return [
            self._fault(phase, steps if phase == "ending" else 0 if place == 0 else places[place])
            for place, phase in enumerate(phases)
        ]

    def _fault(self, phase: Phase, step: int) -> Fault:
        target = self._next(self._targets)
        others = self._random.sample(sorted(KINDS), len(KINDS))
        preferred = (target,) if target in (COMMAND, GROUP, STORE, ANY) else (target, *others)
        return Fault(
            phase=phase,
            step=step,
            delay=self._random.uniform(*_DELAYS[phase]),
            stage=self._random.choice(("raylet", "feed", "rank")),
            targets=preferred,
            pick=self._random.random(),
            deed=self._deed(target),
            seconds=self._seconds(target),
        )

    def _deed(self, target: str) -> str:
        if target == STORE:
            return str(self._next(OUTAGES))
        return self._next(GESTURES if target == COMMAND else GESTURES[:-1] if target == GROUP else DEEDS)

    def _seconds(self, target: str) -> float:
        least, most = (1.0 / self._scale, 600.0 / self._scale) if target == STORE else (0.1, 15.0)
        return math.exp(self._random.uniform(math.log(least), math.log(most)))

    def _next(self, kinds: Sequence[_T]) -> _T:
        deck = self._decks.setdefault(tuple(kinds), [])
        if not deck:
            deck += kinds
            self._random.shuffle(deck)
        drawn: _T = deck.pop()
        return drawn
