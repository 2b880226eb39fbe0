"""The watchdog: finds ranks that hang, and the ranks that caused it.

Neither Ray nor NCCL ends a hang inside a collective. So the driver asks every rank for a heartbeat four times a second
(less often with more than 125 ranks), and a thread of the rank answers with the rank's step and activity. A rank whose
heartbeats show no progress for too long is stuck; a rank without heartbeats is frozen or cut off. All ranks wait for
the slowest, so all are stuck soon after one is: the whole group is killed, and the driver starts another.

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

TRAINING_ACTIVITY = "training"  # activity that a rank reports during a step
TRIAL_SUM_ACTIVITIES = {"nccl": "in the first NCCL sum", "gloo": "in the first gloo sum"}
"""The activity of a rank during the trial all-reduce before training (`launcher.runtime.preflight.collective`), by
communication library."""
_STAGE_BY_ACTIVITY = {"starting": 0, "loading": 1}  # the first activities of a rank, in order
_MAX_GAP_S = 1.0  # a longer time between two checks counts as this long

MIN_HEARTBEAT_INTERVAL_S = 0.25
MAX_HEARTBEATS_PER_S = 500  # limit for all ranks together: it takes two fifths of a core of the driver


def heartbeat_interval_s(ranks: int) -> float:
    """Return the seconds between two heartbeats of each of `ranks` ranks."""
    return max(MIN_HEARTBEAT_INTERVAL_S, ranks / MAX_HEARTBEATS_PER_S)


class Watchdog(StrictRecord):
    """Time limits of the watchdog, in seconds: if one is exceeded, the ranks are killed and started again.

    Attributes:
        step: limit for one training step, and for the trial all-reduce before training.
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
        count: number of this heartbeat, counted since the rank joined its present group.
        step, doing: the step and the activity that the rank reported.
        done: progress within that activity, a count that never falls: microbatches evaluated, bytes uploaded.
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
    """A rank as last checked: its latest heartbeat, seconds since that heartbeat came (`silent`), and seconds since the
    rank last made progress (`idle`)."""

    beat: RankHeartbeat
    silent: float = 0.0
    idle: float = 0.0

    def advance(self, beat: RankHeartbeat, elapsed_s: float) -> "_LastSeen":
        """Return the state after the next check, `elapsed_s` seconds later, when `beat` is the latest heartbeat."""
        if beat.place != self.beat.place:
            return _LastSeen(beat)
        silent = self.silent + elapsed_s if beat.count == self.beat.count else 0.0
        idle = self.idle + elapsed_s if beat.position == self.beat.position else 0.0
        return _LastSeen(beat, silent, idle)


class HeartbeatObserver:
    """Finds stuck ranks from their heartbeats.

    At most one second is counted between two checks. If more has passed, this process itself was stopped or slow, and
    no rank is to blame.

    Args:
        clock: monotonic clock in seconds.
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
        """Return the stuck ranks, those at the lowest step first; empty if none is stuck."""
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
    """Return the ranks that caused a hang; empty if that is unknown.

    They are the ranks of `stuck_ranks` that send no heartbeats. If all send heartbeats, they are the ranks with the
    least progress, unless all ranks have made the same progress.

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
    """Return the progress of each rank as a tuple that can be compared. `RankHeartbeat.done` is compared only if all
    ranks are at the same step and activity."""
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
    """Return the Python tracebacks of all threads of this process as text. Any thread may call it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    ]
    return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n\n" + "\n".join(parts)
