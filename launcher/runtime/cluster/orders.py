"""What driver, coordinator and ranks tell each other: a rank's assignment, and the state of the run.

A rank's process loads this module with the coordinator's handle, before it has its seat, so the module must not import
torch. The module of the ranks' actor (`launcher.runtime.cluster.rank_process`), which imports as little as it can
before, does not import it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data_service.service.feed import FeedHandle
from launcher.runtime.policies.watchdog import Beat
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.removals import CorpusStates


@dataclass(frozen=True)
class Assignment:
    """The data that the driver hands every rank."""

    run_uri: str
    coordinator: Any
    feed: FeedHandle
    recipe: Recipe
    save_multiple: int  # a pause is only allowed after a multiple of so many steps
    removals: CorpusStates  # what the run is to go on without, which it records where it resumes
    before: Mapping[str, float]  # seconds that each part of the start has taken so far, by the part's name
    # The keeper of states in memory on each node, by the node's id; empty without copies.
    keepers: Mapping[str, Any]
    # Whether keepers may hold states of an earlier group of this command.
    remembers: bool
    # How many of the group's processes stayed from the last group, were spares, are new.
    processes: Mapping[str, int]


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
    """

    stop: bool
    pause: bool
    hand_over: bool
    stacks: bool


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
