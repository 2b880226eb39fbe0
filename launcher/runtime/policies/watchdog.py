"""The watchdog: which ranks make no progress, and whose fault that is.

Nothing in Ray or NCCL bounds a hang inside a collective. So the driver asks every rank for a heartbeat four times a
second, less often if there are more than 125 ranks, and a thread of the rank answers. It says what the rank is doing. A
rank whose heartbeats say the same for too long is stuck; a rank without heartbeats is frozen or cut off. All ranks wait
for the slowest, so all are stuck soon after one is: the group is killed as a whole, and the driver starts another.

The watchdog uses only its own clock: it counts heartbeats, and never compares times across machines.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from data_service.formats import StrictRecord

TRAINING_ACTIVITY = "training"
TRIAL_SUM_ACTIVITIES = {"nccl": "in the first NCCL sum", "gloo": "in the first gloo sum"}
"""The activity of a rank during the trial sums before training (`launcher.runtime.preflight.collective`), by the
library that sums."""
_STAGE_BY_ACTIVITY = {"starting": 0, "loading": 1}  # the first activities of a rank, in this order
_MAX_GAP_S = 1.0  # most seconds that count between two checks


MIN_HEARTBEAT_INTERVAL_S = 0.25
MAX_HEARTBEATS_PER_S = 500  # most heartbeats a second of all ranks together: they take the driver two fifths of a core


def heartbeat_interval_s(ranks: int) -> float:
    """Return the seconds between two heartbeats of one of so many ranks."""
    return max(MIN_HEARTBEAT_INTERVAL_S, ranks / MAX_HEARTBEATS_PER_S)


class Watchdog(StrictRecord):
    """Time limits, in seconds, after which the ranks are killed and started again.

    Attributes:
        step: limit for one training step, and for the first sums over the network before training.
        other: limit without progress in any other activity: starting, loading, evaluating, saving. Each microbatch and
            each part of an upload is progress.
        silence: limit without any heartbeat.
    """

    step: float = Field(default=600.0, gt=0)
    other: float = Field(default=1800.0, gt=0)
    silence: float = Field(default=120.0, gt=0)


@dataclass(frozen=True)
class RankLocation:
    """The identity of a rank's process: the id of its Ray node, the process id, the machine's name."""

    node: str
    pid: int
    host: str = ""

    def __str__(self) -> str:
        return self.host or self.node[:8]


@dataclass(frozen=True)
class RankHeartbeat:
    """The latest heartbeat of a rank.

    Attributes:
        count: number of heartbeats of the rank's process in its present group.
        step, doing: the step and the activity that the rank reported.
        done: progress within that activity, a count that only increases: microbatches evaluated, bytes uploaded.
        place: the rank's process.
    """

    count: int
    step: int
    doing: str
    done: int
    place: RankLocation

    @property
    def position(self) -> tuple[int, str, int]:
        return self.step, self.doing, self.done


@dataclass(frozen=True)
class StuckRank:
    """A rank that must be killed, and why.

    Attributes:
        silent: whether the rank sends no heartbeats. If False, it sends them but makes no progress.
        why: what the rank has failed to do and for how long, as text.
    """

    rank: int
    silent: bool
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.why}"


@dataclass(frozen=True)
class _LastSeen:
    """What was seen of a rank: its latest heartbeat, seconds since that came (`silent`), and seconds since the rank
    last made progress (`idle`)."""

    beat: RankHeartbeat
    silent: float = 0.0
    idle: float = 0.0

    def advance(self, beat: RankHeartbeat, elapsed_s: float) -> "_LastSeen":
        """Return what is seen at the next look, `elapsed_s` seconds later."""
        if beat.place != self.beat.place:
            return _LastSeen(beat)
        silent = self.silent + elapsed_s if beat.count == self.beat.count else 0.0
        idle = self.idle + elapsed_s if beat.position == self.beat.position else 0.0
        return _LastSeen(beat, silent, idle)


class HeartbeatObserver:
    """An observer of the ranks' heartbeats that finds the stuck ranks.

    Between two looks at most one second counts. If more has passed, the observer itself was stopped or could not ask,
    and no rank is to blame for that.

    Args:
        clock: function that returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked: float | None = None
        self._seen: dict[int, _LastSeen] = {}
        self._unheard: dict[int, float] = {}  # seconds for which a started rank has not had its first heartbeat

    def observe(self, beats: Mapping[int, RankHeartbeat], started_ranks: int) -> None:
        """Record the latest heartbeat of every rank. `started_ranks`: number of ranks whose processes are to join."""
        now = self._clock()
        watched = 0.0 if self._looked is None else min(now - self._looked, _MAX_GAP_S)
        self._looked = now
        known = self._seen
        self._seen = {
            rank: known[rank].advance(beat, watched) if rank in known else _LastSeen(beat)
            for rank, beat in beats.items()
        }
        self._unheard = {
            rank: self._unheard.get(rank, 0.0) + watched for rank in range(started_ranks) if rank not in beats
        }

    def find_stuck_ranks(self, limits: Watchdog) -> list[StuckRank]:
        """Return the ranks that must be killed, those at the lowest step first; empty if none is stuck."""
        found = [
            (seen.beat.step, stuck)
            for rank, seen in self._seen.items()
            if (stuck := _check_rank(rank, seen, limits)) is not None
        ]
        found += [
            (0, StuckRank(rank, True, f"has not begun {seconds:.0f} s after its start"))
            for rank, seconds in self._unheard.items()
            if seconds > limits.other
        ]
        return [stuck for _, stuck in sorted(found, key=lambda one: (one[0], one[1].rank))]


def _check_rank(rank: int, seen: _LastSeen, limits: Watchdog) -> StuckRank | None:
    where = f"{seen.beat.doing} at step {seen.beat.step}"
    if seen.silent > limits.silence:
        return StuckRank(rank, True, f"has been silent for {seen.silent:.0f} s, last {where}")
    as_a_step = seen.beat.doing in (TRAINING_ACTIVITY, *TRIAL_SUM_ACTIVITIES.values())
    if seen.idle > (limits.step if as_a_step else limits.other):
        return StuckRank(rank, False, f"has made no progress for {seen.idle:.0f} s, {where}")
    return None


def find_culprits(stuck_ranks: Sequence[StuckRank], beats: Mapping[int, RankHeartbeat]) -> list[int]:
    """Return the ranks that the others waited for; empty if that cannot be told.

    They are the ranks of `stuck_ranks` that send no heartbeats. If all of `stuck_ranks` send heartbeats, they are
    the ranks with the least progress, unless all ranks have made the same progress.

    Args:
        stuck_ranks: the stuck ranks.
        beats: latest heartbeat of every rank.
    """
    silent = [stuck.rank for stuck in stuck_ranks if stuck.silent]
    if silent:
        return silent
    progress = _progress_by_rank(beats)
    last = [rank for rank, at in progress.items() if at == min(progress.values())]
    return last if len(last) < len(progress) else []


def _progress_by_rank(beats: Mapping[int, RankHeartbeat]) -> dict[int, tuple[int, int, int]]:
    """Return how far each rank is, as comparable tuples. `RankHeartbeat.done` counts only if all ranks are at one step
    and activity."""
    alike = len({(beat.step, beat.doing) for beat in beats.values()}) == 1
    return {
        rank: (
            _STAGE_BY_ACTIVITY.get(beat.doing, len(_STAGE_BY_ACTIVITY)),
            beat.step,
            beat.done if alike else 0,
        )
        for rank, beat in beats.items()
    }


def stack_of_every_thread() -> str:
    """Return a Python traceback of every thread of this process. It can be called from any thread while others wait."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    ]
    return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n\n" + "\n".join(parts)
