"""The failure policy: what to do when a group of ranks has died. A pure function of the failures so far.

Almost every failure is answered by starting again: machines die, and a restart costs seconds. What a restart cannot
cure shows by repeating itself:

1. An error at the same step every time comes from the program or its data.
2. A machine that is the first to fail again and again is broken.
3. Starts that raise before they finish a step are set up wrongly.
4. Deaths without end, and without a checkpoint between them, lead nowhere.

A store that does not answer does not count as a failure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SAME_ERROR = 3  # times in a row, at one step
FRUITLESS = 4  # starts in a row that raised before they finished a step
BARREN = 16  # failures of any kind in a row, and no newer checkpoint
NODE_FAILURES = 3  # of one node, first to fail, among the latest
NODE_LATEST = 6  # failures that are looked at to judge a node
NODE_HOURS = 12.0  # older ones are forgotten

_MENDED = "after mending, the same command resumes the run"
_TRACES = f"see the tracebacks in events/stacks/ of the run; {_MENDED}"

Kind = Literal["raised", "silent", "transient"]
"""A rank raised; one died without a word (killed, frozen, its machine lost); the store did not answer."""


@dataclass(frozen=True)
class Failure:
    """One unrequested end of a group of ranks.

    Attributes:
        time: seconds since 1970.
        step: steps that were done.
        committed: steps of the newest checkpoint that was known of.
        worked: whether a step had been finished since the start before it.
        node: where the rank that failed first was; None if that is not known.
        error: type and text of what it raised; None if it died without a word.
    """

    time: float
    step: int
    committed: int
    worked: bool
    node: str | None
    error: str | None
    kind: Kind


@dataclass(frozen=True)
class Restart:
    """Start the ranks again, on whatever machines there are, but for those in `without`."""

    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stop:
    """End the run: no start would help. `reason` is for the operator, and what to do about it."""

    reason: str
    remedy: str


def where_it_began(
    places: Mapping[int, str], errors: Mapping[int, str], failed: Sequence[int], blamed: Sequence[int] | None
) -> str | None:
    """Return the node on which a group's failure began; None if that is not known.

    Ranks that died without an error come before ranks that raised: a death makes the other ranks raise.

    Args:
        places: the node of each rank that was heard of.
        errors: what ranks raised, in the order in which they told.
        failed: the ranks that ended the group, as far as Ray knows.
        blamed: the ranks at fault, whoever raised the error; empty if nobody can tell, None if no error says.
    """
    if blamed is not None:
        return _only({places[rank] for rank in blamed if rank in places})
    silent = {places[rank] for rank in failed or places if rank in places and rank not in errors}
    if silent:
        return _only(silent)
    first = next(iter(errors), None)
    return None if first is None else places.get(first)


def decide(failures: Sequence[Failure], nodes: int) -> Restart | Stop:
    """Return what to do after the last of `failures`, which are those of all starts of a run, oldest first. `nodes`:
    how many nodes could hold ranks; a node is excluded only while others remain."""
    counted = [failure for failure in failures if failure.kind != "transient"]
    return _repeated(counted) or _barren(counted) or Restart(_bad_nodes(counted, nodes))


def _repeated(counted: Sequence[Failure]) -> Stop | None:
    """Return the error that ranks raise again and again. A death without an error and before the first finished step
    says nothing about that, so it is passed over."""
    telling = [failure for failure in counted if failure.kind == "raised" or failure.worked]
    same = telling[-SAME_ERROR:]
    if len(same) == SAME_ERROR and same[-1].error and all(_alike(failure, same[-1]) for failure in same):
        reason = f"step {same[-1].step} failed {SAME_ERROR} times in the same way: {same[-1].error}"
        return Stop(reason, _TRACES)
    row = telling[-FRUITLESS:]
    if len(row) == FRUITLESS and not any(failure.worked for failure in row):
        reason = f"the ranks failed {FRUITLESS} times in a row before finishing a step, at last with {row[-1].error}"
        return Stop(reason, _TRACES)
    return None


def _barren(counted: Sequence[Failure]) -> Stop | None:
    row = counted[-BARREN:]
    if len(row) < BARREN or len({failure.committed for failure in row}) > 1:
        return None
    reason = f"the ranks died {BARREN} times in a row without a checkpoint newer than that of step {row[-1].committed}"
    return Stop(reason, f"see the events of the run, and save more often (checkpoint.every); {_MENDED}")


def _only(nodes: set[str]) -> str | None:
    return nodes.pop() if len(nodes) == 1 else None


def _alike(failure: Failure, last: Failure) -> bool:
    return failure.step == last.step and failure.error == last.error


def _bad_nodes(failures: Sequence[Failure], nodes: int) -> frozenset[str]:
    recent = [
        failure.node
        for failure in failures[-NODE_LATEST:]
        if failure.node is not None and failures[-1].time - failure.time <= 3600 * NODE_HOURS
    ]
    bad = [node for node, count in Counter(recent).most_common() if count >= NODE_FAILURES]
    return frozenset(bad[: max(0, nodes - 1)])
