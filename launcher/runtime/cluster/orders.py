"""How a run stands: what the coordinator tells the driver and the ranks. A rank's process loads this with the
coordinator's handle, before it has its seat: so nothing here may reach torch."""

from dataclasses import dataclass, field
from typing import Any

from launcher.runtime.policies.watchdog import Beat


class CoordinatorLost(Exception):
    """The coordinator is dead or does not answer. The driver then starts another one, and other ranks."""


@dataclass(frozen=True)
class Fatal:
    """Why the run cannot go on, and what the operator should do.

    Attributes:
        repeated: it has happened so often that no further start is expected to help; otherwise it is a mistake in what
            the run was given.
    """

    problem: str
    remedy: str
    repeated: bool = False


@dataclass(frozen=True)
class Orders:
    """The coordinator's answer to a rank's heartbeat.

    Attributes:
        stop: end after this step.
        pause: end at the next step after which a checkpoint may be taken.
        stacks: send what every thread is doing.
    """

    stop: bool
    pause: bool
    stacks: bool


@dataclass
class Status:
    """What the driver shows and decides on.

    Attributes:
        group: counts the worker groups that were let start.
        starts: times a worker group began to train.
        attempt: the attempt number of the present worker group.
        beats: per rank, its last sign of life.
        record: the newest step record.
        evaluation: the newest evaluation record.
        finished: the step at which all ranks ended in good order, None while they run.
        without: nodes that no rank may be on any more.
        paused: the ranks are to end at a checkpoint, or have done so, for others to go on from there.
        idle: no rank runs and none will: a stop was asked for while they were to start, or the run was taken over.
        superseded: somebody else has claimed a newer attempt of the run.
        unsaved: a stop was asked for, and the ranks ended without their last checkpoint, for this reason. `finished`
            stays None: the run stands at its newest commit.
        fatal: set once; the worker group must not be restarted.
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
    idle: bool = False
    superseded: bool = False
    unsaved: str | None = None
    fatal: Fatal | None = None
