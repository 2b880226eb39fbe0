"""What the driver and a rank tell each other: the assignment that a rank gets with its seat, orders, news, and how a
rank's part in a group ends. The module must not import torch: what it defines crosses into a rank's process before that
has its seat. Nor does it import a recipe's schema, which takes a second."""

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
    """The data that the driver hands every rank."""

    run_uri: str
    feed: "FeedHandle"
    recipe: "Recipe"
    record: "RunRecord"
    save_multiple: int  # a pause is only allowed after a multiple of so many steps
    removals: "CorpusStates"  # removed documents; recorded at the step from which the run resumes
    before: Mapping[str, float]  # seconds that each part of the start has taken so far, by the part's name
    # The keeper of states in memory on each node, by the node's id; empty without copies.
    keepers: Mapping[str, Any]
    # Whether keepers may hold states of an earlier group of this command.
    remembers: bool
    # How many of the group's processes stayed from the last group, were spares, are new.
    processes: Mapping[str, int]


@dataclass(frozen=True)
class RankOrders:
    """The driver's orders to a rank.

    Attributes:
        stop: whether the rank must end after this step.
        pause: whether the rank must end at the next step after which a checkpoint may be taken.
        hand_over: whether a pause needs no checkpoint in the store, because other ranks go on at once.
        stacks: whether the rank must answer with the tracebacks of its threads.
        abort: whether the rank must leave what it computes with the others, because one of them is gone.
    """

    stop: bool = False
    pause: bool = False
    hand_over: bool = False
    stacks: bool = False
    abort: bool = False


@dataclass(frozen=True)
class RankNews:
    """A rank's answer to orders.

    Attributes:
        resumed: the step at which the group resumes; None until the rank loads a state.
        records: the newest records of steps and evaluations since the last answer.
        notes: lines for the operator since the last answer.
        events: kind and fields of the events that this rank alone knows of, since the last answer.
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
    """The rank is in its group, whose nodes are fit, and waits for the number of the attempt. `warnings`: those of the
    preflight, as lines for the operator."""

    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class FinishedTraining:
    """The rank ended in good order after `step` steps. `saved`: whether the last state is committed; if not, it is in
    memory, for the next group."""

    step: int
    saved: bool = True


@dataclass(frozen=True)
class EndedUnsaved:
    """The rank ended as requested, but the last save failed because of `reason`: the newest commit holds the run's
    state."""

    reason: str


@dataclass(frozen=True)
class RestartFromEarlierState:
    """The rank ends so that the next group resumes from an earlier state. It is no failure."""


@dataclass(frozen=True)
class RunTakenOver:
    """Another start has claimed a newer attempt of the run."""

    problem: str


@dataclass(frozen=True)
class UnfitNodes:
    """The preflight found nodes on which no rank may train: the fields of each one's event, what is wrong, and what to
    do about it."""

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
        blamed: the ranks at fault according to the error, whichever rank raised it; empty if it says that the fault
            cannot be located; None if it says nothing.
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
"""How a rank's part in a group ended, or that it has joined the group."""


@dataclass(frozen=True)
class RankResult:
    """The result of the driver's call to a rank.

    Attributes:
        stays: whether the process can train again.
        news: the rank's last news; None if it had no line to the driver yet.
    """

    outcome: RankOutcome
    stays: bool
    news: RankNews | None = None
