"""The failure policy: what to do when a group of ranks has died. It is a pure function of the failures so far.

Almost every failure leads to a restart, which costs seconds. Failures that restarts do not cure are recognised because
they repeat:

1. An error at the same step every time comes from the program or its data: the run ends.
2. Several recent failures that began on one node: the node is broken and is excluded.
3. Several groups in a row that raise before they finish a step: the setup is wrong, and the run ends.
4. Several deaths in a row without an error, from the same checkpoint, either all before the first step or all after
   it: the kernel may have killed ranks for lack of memory. The next ranks save memory: no in-memory copies of the
   state, no spare processes.
5. Many failures in a row without a newer checkpoint: there is no progress, and the run ends.

Failures because the store did not answer are not counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SAME_ERROR_LIMIT = 3  # the run ends after this many equal errors in a row at the same step
FAILED_START_LIMIT = 4  # the run ends after this many groups in a row raised before finishing a step
SILENT_DEATH_LIMIT = 5  # memory counts as short after this many silent deaths in a row from one checkpoint
UNSAVED_FAILURE_LIMIT = 16  # the run ends after this many failures in a row without a newer checkpoint
NODE_FAILURE_LIMIT = 3  # a node is excluded after this many recent failures began on it
NODE_WINDOW_FAILURES = 6  # number of newest failures that count against nodes
NODE_FAILURE_HOURS = 12.0  # older failures no longer count against their node

_RESUME_ADVICE = "once the cause is mended, the same command resumes the run"
_TRACES_ADVICE = f"see the tracebacks in events/stacks/ of the run; {_RESUME_ADVICE}"

FailureKind = Literal["raised", "silent", "transient"]
""""raised": a rank raised an error. "silent": a rank died without an error (killed, frozen, its machine lost).
"transient": the store did not answer."""


@dataclass(frozen=True)
class Failure:
    """The failure of a group of ranks: it ended although nobody had asked it to stop.

    Attributes:
        time: time of the failure, in seconds since 1970.
        step: number of steps done when the group failed.
        committed: number of steps in the newest saved state, in the store or in memory.
        worked: whether the group finished a step after its start.
        node: Ray id of the node on which the failure began; None if unknown.
        error: type and text of the error that the rank raised; None if it died without one.
    """

    time: float
    step: int
    committed: int
    worked: bool
    node: str | None
    error: str | None
    kind: FailureKind


@dataclass(frozen=True)
class RestartDecision:
    """A decision to start the ranks again, on any nodes except `without`. `frugal`: to save memory, without in-memory
    copies of the state and without spare processes."""

    without: frozenset[str] = frozenset()
    frugal: bool = False


@dataclass(frozen=True)
class StopDecision:
    """A decision to end the run because a restart would not help. `reason` and `remedy` are texts for the operator."""

    reason: str
    remedy: str


def find_first_failed_node(
    node_by_rank: Mapping[int, str],
    error_by_rank: Mapping[int, str],
    failed_ranks: Sequence[int],
    blamed_ranks: Sequence[int] | None,
) -> str | None:
    """Return the node on which a group's failure began; None if unknown.

    Ranks that died without an error are blamed before ranks that raised: one death makes the other ranks raise.

    Args:
        node_by_rank: node of each rank that sent a heartbeat.
        error_by_rank: texts of the errors that ranks raised, in the order in which they were reported.
        failed_ranks: the ranks that ended the group, as far as Ray knows.
        blamed_ranks: the ranks at fault according to an error, whichever rank raised it; empty if the error says
            that the fault cannot be located; None if no error says anything about it.
    """
    if blamed_ranks is not None:
        return _single_node({node_by_rank[rank] for rank in blamed_ranks if rank in node_by_rank})
    silent = {
        node_by_rank[rank]
        for rank in failed_ranks or node_by_rank
        if rank in node_by_rank and rank not in error_by_rank
    }
    if silent:
        return _single_node(silent)
    first = next(iter(error_by_rank), None)
    return None if first is None else node_by_rank.get(first)


def decide_after_failure(failures: Sequence[Failure], node_count: int) -> RestartDecision | StopDecision:
    """Return what to do after the last of `failures`.

    Args:
        failures: the failures of all starts of a run, oldest first.
        node_count: number of nodes that can hold ranks. A node is excluded only while others remain.
    """
    counted = [failure for failure in failures if failure.kind != "transient"]
    restart = RestartDecision(_bad_nodes(counted, node_count), frugal=_memory_seems_short(counted))
    return _stop_if_repeated(counted) or _stop_if_no_newer_commit(counted) or restart


def _stop_if_repeated(counted: Sequence[Failure]) -> StopDecision | None:
    """Return the decision to end a run whose ranks raise again and again; None if they do not. A death
    without an error before the group's first step is ignored: it does not show whether the ranks would raise again."""
    telling = [failure for failure in counted if failure.kind == "raised" or failure.worked]
    same = telling[-SAME_ERROR_LIMIT:]
    if len(same) == SAME_ERROR_LIMIT and same[-1].error and all(_is_same_error(failure, same[-1]) for failure in same):
        reason = f"step {same[-1].step} failed {SAME_ERROR_LIMIT} times in the same way: {same[-1].error}"
        return StopDecision(reason, _TRACES_ADVICE)
    row = telling[-FAILED_START_LIMIT:]
    if len(row) == FAILED_START_LIMIT and not any(failure.worked for failure in row):
        reason = f"the ranks failed {len(row)} times in a row before finishing a step, at last with {row[-1].error}"
        return StopDecision(reason, _TRACES_ADVICE)
    return None


def _memory_seems_short(counted: Sequence[Failure]) -> bool:
    """Return whether the last failures were silent deaths from the same checkpoint (rule 4 of the module docstring)."""
    row = counted[-SILENT_DEATH_LIMIT:]
    silent = all(failure.kind == "silent" for failure in row)
    # A group that made steps may have left newer copies in memory, so it does not count with groups that made none.
    return len(row) == SILENT_DEATH_LIMIT and silent and len({(each.committed, each.worked) for each in row}) == 1


def _stop_if_no_newer_commit(counted: Sequence[Failure]) -> StopDecision | None:
    row = counted[-UNSAVED_FAILURE_LIMIT:]
    if len(row) < UNSAVED_FAILURE_LIMIT or len({failure.committed for failure in row}) > 1:
        return None
    last = row[-1]
    reason = f"the ranks died {len(row)} times in a row without a checkpoint newer than that of step {last.committed}"
    reason += f", at last by {last.error}" if last.error else ""
    return StopDecision(reason, f"see the events of the run, and save more often (checkpoint.every); {_RESUME_ADVICE}")


def _single_node(nodes: set[str]) -> str | None:
    return nodes.pop() if len(nodes) == 1 else None


def _is_same_error(failure: Failure, last: Failure) -> bool:
    return failure.step == last.step and failure.error == last.error


def _bad_nodes(failures: Sequence[Failure], node_count: int) -> frozenset[str]:
    """Return the nodes to exclude (rule 2 of the module docstring), at most all but one."""
    recent = [
        failure.node
        for failure in failures[-NODE_WINDOW_FAILURES:]
        if failure.node is not None and failures[-1].time - failure.time <= 3600 * NODE_FAILURE_HOURS
    ]
    bad = [node for node, count in Counter(recent).most_common() if count >= NODE_FAILURE_LIMIT]
    return frozenset(bad[: max(0, node_count - 1)])
