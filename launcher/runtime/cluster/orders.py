"""The messages between the driver and its ranks: the assignment at the start, orders, news, and the outcome of a rank.

This module must not import torch, because a rank unpickles these messages before it may import torch
(`launcher.runtime.cluster.rank_placement`). It does not import the recipe's schema either, which takes a second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.runtime.policies.failures import FailureKind
from launcher.runtime.policies.watchdog import RankHeartbeat

if TYPE_CHECKING:
    from data_service.service.feed import FeedHandle
    from launcher.runtime.recipe.schema import Recipe
    from launcher.runtime.run.record import RunRecord
    from launcher.runtime.run.removals import CorpusStates


@dataclass(frozen=True)
class Assignment:
    """The data that the driver sends to every rank when its group starts."""

    run_uri: str
    feed: "FeedHandle"  # handle of the data service
    recipe: "Recipe"
    record: "RunRecord"  # content of run.json
    save_multiple: int  # ranks may pause only after a multiple of this many steps
    removals: "CorpusStates"  # documents removed from the corpora, to skip from the resumed step on
    before: Mapping[str, float]  # seconds of each part of the start so far, by name (`StartupClock`)
    # The memory keeper of each node, by node id; empty if ranks make no in-memory copies.
    keepers: Mapping[str, Any]
    # Whether keepers may hold in-memory copies of an earlier group of this command.
    remembers: bool
    # How many of the group's processes come from where: "stayed" (from the last group), "spare", "new".
    processes: Mapping[str, int]


@dataclass(frozen=True)
class RankOrders:
    """The driver's orders to a rank.

    Attributes:
        stop: whether the rank must end after this step.
        pause: whether the rank must end at the next step after which a checkpoint may be taken.
        hand_over: whether a paused rank leaves its state in memory instead of saving it: the next group continues at
            once.
        stacks: whether the rank must answer with the tracebacks of its threads.
        abort: whether the rank must abort its collectives, because another rank has died.
    """

    stop: bool = False
    pause: bool = False
    hand_over: bool = False
    stacks: bool = False
    abort: bool = False


@dataclass(frozen=True)
class RankNews:
    """A rank's answer to orders: its heartbeat `beat`, and what has happened since its last answer.

    Attributes:
        resumed: the step from which the group resumes; None until the rank loads a state.
        records: records of steps and evaluations; the oldest are missing if there were too many.
        notes: lines for the operator.
        events: kind and fields of events that only this rank knows of.
        stack: tracebacks of the rank's threads, if the orders ask for them.
    """

    beat: RankHeartbeat
    resumed: int | None = None
    records: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    events: Sequence[tuple[str, Mapping[str, Any]]] = ()
    stack: str | None = None


@dataclass(frozen=True)
class JoinedGroup:
    """The rank has joined its group, whose nodes passed the checks before training (preflight), and waits to train.
    `warnings`: warnings of the preflight, as lines for the operator."""

    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class FinishedTraining:
    """The rank ended without an error after `step` steps. `saved`: whether the last state is committed as a
    checkpoint; if not, it is in memory for the next group."""

    step: int
    saved: bool = True


@dataclass(frozen=True)
class EndedUnsaved:
    """The rank ended as requested, but the last save failed because of `reason`. A resume starts from an earlier
    checkpoint."""

    reason: str


@dataclass(frozen=True)
class RestartFromEarlierState:
    """The rank ended so that the next group resumes from an earlier state: after a loss spike, or with a smaller
    microbatch. This does not count as a failure."""


@dataclass(frozen=True)
class RunTakenOver:
    """Another start has claimed a newer attempt of the run."""

    problem: str


@dataclass(frozen=True)
class UnfitNodes:
    """The preflight found nodes on which no rank may train. `preflights`: fields of each node's event. `problem`,
    `remedy`: texts for the operator."""

    preflights: Sequence[Mapping[str, Any]]
    problem: str
    remedy: str


@dataclass(frozen=True)
class FatalError:
    """The reason why a run cannot continue, and what the operator should do."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class RankError:
    """The error with which a rank ended.

    Attributes:
        text: type and text of the error.
        kind: kind of the failure; `silent` if the error only shows that another process has died.
        trace: traceback of the error.
        blamed: the ranks at fault according to the error, whichever rank raised it; empty if the error says that the
            fault cannot be located; None if it names no ranks.
    """

    text: str
    kind: FailureKind
    trace: str = ""
    blamed: Sequence[int] | None = None


RankOutcome = (
    JoinedGroup
    | FinishedTraining
    | EndedUnsaved
    | RestartFromEarlierState
    | RunTakenOver
    | UnfitNodes
    | FatalError
    | RankError
)
"""The result of a rank's call: it has joined the group, or how its training ended."""


@dataclass(frozen=True)
class RankResult:
    """What a rank's method `join` or `train` returns to the driver.

    Attributes:
        stays: whether the process can train again in another group.
        news: the rank's last news; None if it failed before it could collect news.
    """

    outcome: RankOutcome
    stays: bool
    news: RankNews | None = None
