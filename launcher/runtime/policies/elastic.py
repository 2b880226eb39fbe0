"""How many ranks train: what the operator allows, what the cluster can hold, and when that changes.

The batch does not depend on the number of ranks, because logical microbatches are dealt to however many there are. So
only the machines decide the number. The coordinator calls these pure functions whenever a group of ranks may start or
grow.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class Trainers(BaseModel):
    """A number of ranks that may change while a run goes on.

    Attributes:
        min: with fewer, the run waits for machines.
        max: more are not used. "auto": a rank for every GPU of the cluster; without GPUs, one for each core of this
            machine, two at most.
        wait: seconds in which a lost machine may come back before training goes on without it; and in which the
            cluster must not have changed before training is stopped to take more ranks.
        grow: seconds that ranks train before they are stopped, at a checkpoint, so that more can take part.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    min: PositiveInt = 1
    max: PositiveInt | Literal["auto"] = "auto"
    wait: Annotated[float, Field(ge=0)] = 60.0
    grow: Annotated[float, Field(gt=0)] = 1800.0

    @model_validator(mode="after")
    def _ordered(self) -> "Trainers":
        if self.max != "auto" and self.max < self.min:
            raise ValueError(f"at least {self.min} ranks and at most {self.max}: no number is both")
        return self


@dataclass(frozen=True)
class Sizing:
    """What a run asks of the cluster it is on.

    Attributes:
        least, most: ranks.
        expected: ranks that the first group of a command waits for, if they are not there at once.
        wait, grow: as in `Trainers`.
        each: by resource, what one rank reserves of its node.
    """

    least: int
    most: int
    expected: int
    wait: float
    grow: float
    each: Mapping[str, float]


@dataclass(frozen=True)
class GroupStart:
    """Start so many ranks, on any nodes but those in `without`."""

    ranks: int
    without: frozenset[str]


def places(nodes: Iterable[Mapping[str, Any]], each: Mapping[str, float], without: Container[str]) -> int:
    """Return how many ranks fit on the living nodes of `ray.nodes()`, leaving out the nodes in `without`."""
    return sum(
        min(int(node["Resources"].get(name, 0) // amount) for name, amount in each.items())
        for node in nodes
        if node["Alive"] and node["NodeID"] not in without
    )


def start(sizing: Sizing, found: int, wanted: int, waited: float) -> int | None:
    """Return how many ranks to start when `found` places are there; None: wait longer.

    As many as there are places for, up to `sizing.most`; never fewer than `sizing.least`. Fewer than `wanted` (as many
    as trained before, or as the first group expects) only after `sizing.wait` seconds.
    """
    possible = min(found, sizing.most)
    if possible < sizing.least:
        return None
    return possible if possible >= min(wanted, sizing.most) or waited >= sizing.wait else None


def grows(sizing: Sizing, found: int, world: int, worked: float, unchanged: float) -> bool:
    """Return whether the present `world` ranks should make room for more.

    Args:
        found: places in the cluster.
        worked: seconds that the present ranks have been at work.
        unchanged: seconds since the number of places last changed: machines rarely come alone.
    """
    return min(found, sizing.most) > world and worked >= sizing.grow and unchanged >= sizing.wait


def exclude_nodes(
    nodes: Sequence[Mapping[str, Any]], sizing: Sizing, out: frozenset[str], bad: frozenset[str]
) -> frozenset[str]:
    """Return the nodes to exclude: those in `out` already, and the `bad` ones as far as enough places remain."""
    for node in sorted(bad - out):
        if places(nodes, sizing.each, out | {node}) >= sizing.least:
            out |= {node}
    return out


def cause(sizing: Sizing, before: int, world: int, *, first: bool) -> str:
    """Return why `world` ranks train and no longer `before`, as text for the record. `first`: this is the command's
    first group."""
    if first:
        return "the command was started again"
    if world < before:
        return f"no place for {before} ranks within {sizing.wait:g} s"
    return f"the cluster has places for {world} ranks"
