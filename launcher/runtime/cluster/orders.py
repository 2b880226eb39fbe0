"""The state of a run, as the coordinator tells it to the driver and the ranks. A rank's process loads this module with
the coordinator's handle, before it has its seat, so the module must not import torch."""

from dataclasses import dataclass, field
from typing import Any

from launcher.runtime.policies.watchdog import Beat


class CoordinatorLost(Exception):
    """The error if the coordinator is dead or does not answer. The driver then starts another one, and other ranks."""


@dataclass(frozen=True)
class Fatal:
    """The reason why a run cannot continue, and what the operator should do.

    Attributes:
        repeated: whether the failure has happened so often that a restart is not expected to help. If False, an input
            of the run is wrong.
    """

    problem: str
    remedy: str
    repeated: bool = False


@dataclass(frozen=True)
class Orders:
    """The coordinator's answer to a rank's heartbeat.

    Attributes:
        stop: whether the rank must end after this step.
        pause: whether the rank must end at the next step after which a checkpoint may be taken.
        hand_over: whether a pause needs no checkpoint in the store, because other ranks go on at once.
        stacks: whether the rank must send the tracebacks of its threads.
        abort: whether the rank must leave what it computes with the others, because one of them is gone.
    """

    stop: bool = False
    pause: bool = False
    hand_over: bool = False
    stacks: bool = False
    abort: bool = False


@dataclass
class Status:
    """The state of a run, which the driver shows and by which it decides.

    Attributes:
        group: number of the present group of ranks, counted over the permissions to start.
        starts: number of groups that began to train.
        attempt: number of the present group's attempt; None before its first.
        beats: latest heartbeat of each rank.
        record: the newest step record.
        evaluation: the newest evaluation record.
        notes: lines for the operator since the last snapshot.
        finished: the step at which all ranks ended in good order; None while they run.
        without: nodes on which no rank may run any more.
        paused: whether the ranks must end at a checkpoint, or have done so, for another group to continue.
        hands_over: whether they may leave the last state in memory alone, or have done so.
        idle: whether no rank runs and none will: a stop was requested before ranks started, or the run was taken over.
        superseded: whether another start has claimed a newer attempt of the run.
        unsaved: why the ranks ended without their last checkpoint after a request to stop; None if they did not.
            `finished` stays None in this case: the newest commit holds the run's state.
        fatal: why the group must not be restarted; set at most once.
    """

    group: int = 0
    starts: int = 0
    attempt: int | None = None
    beats: dict[int, Beat] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    finished: int | None = None
    without: frozenset[str] = frozenset()
    paused: bool = False
    hands_over: bool = False
    idle: bool = False
    superseded: bool = False
    unsaved: str | None = None
    fatal: Fatal | None = None
