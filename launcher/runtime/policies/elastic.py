"""How many ranks train: what the operator allows, what the cluster can hold, and when that changes.

The batch does not depend on the number of ranks, because logical microbatches are dealt to however many there are. So
only the machines decide the number. The driver calls these pure functions whenever a group of ranks may start or
grow.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from data_service.formats import StrictRecord


class Trainers(StrictRecord):
    """A number of ranks that may change while a run goes on.

    Attributes:
        min: smallest number of ranks. With fewer places, the run waits for machines.
        max: largest number of ranks. "auto": one for every GPU of the cluster; without GPUs, one for each core of this
            machine, two at most.
        wait: seconds. A lost machine may come back for so long before training goes on without it. The cluster must
            have been unchanged for so long before training is stopped to take more ranks.
        grow: seconds that ranks train before they are stopped, at a checkpoint, so that more ranks can take part.
    """

    min: PositiveInt = 1
    max: PositiveInt | Literal["auto"] = "auto"
    wait: Annotated[float, Field(ge=0)] = 60.0
    grow: Annotated[float, Field(gt=0)] = 1800.0

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> "Trainers":
        if self.max != "auto" and self.max < self.min:
            raise ValueError(f"at least {self.min} ranks and at most {self.max}: min must not exceed max")
        return self


@dataclass(frozen=True)
class Sizing:
    """The numbers of ranks that a run may have on its cluster, and what each rank reserves.

    Attributes:
        least, most: smallest and largest number of ranks.
        expected: number of ranks that the first group of a command waits for, up to `wait` seconds.
        wait, grow: seconds, as in `Trainers`.
        each: amount that one rank reserves on its node, by the name of the resource.
        data_cpus: cores that a place has for data tasks beside its rank.
    """

    least: int
    most: int
    expected: int
    wait: float
    grow: float
    each: Mapping[str, float]
    data_cpus: float = 0.0

    @property
    def place(self) -> dict[str, float]:
        """What a node must have for each of its ranks, by the name of the resource."""
        return {name: amount + (self.data_cpus if name == "CPU" else 0.0) for name, amount in self.each.items()}


@dataclass(frozen=True)
class GroupStart:
    """A decision to start `ranks` ranks, on any nodes except those in `without`. `frugal`: without copies of
    their state in memory, and without spare processes. `number`: of the group, counted over all decisions."""

    ranks: int
    without: frozenset[str]
    frugal: bool = False
    number: int = field(default=0, compare=False)


def count_places(nodes: Iterable[Mapping[str, Any]], place: Mapping[str, float], excluded_nodes: Container[str]) -> int:
    """Return how many ranks fit on the living nodes of `ray.nodes()`, leaving out the nodes in `excluded_nodes`.
    `place`: as in `Sizing`."""
    return sum(
        min(int(node["Resources"].get(name, 0) // amount) for name, amount in place.items())
        for node in nodes
        if node["Alive"] and node["NodeID"] not in excluded_nodes
    )


def rank_count(sizing: Sizing, place_count: int, wanted_ranks: int, waited_s: float) -> int | None:
    """Return how many ranks to start when the cluster has places for `place_count`; None: wait longer.

    The number is that of the places, at most `sizing.most` and at least `sizing.least`. It is below `wanted_ranks`
    only once `sizing.wait` seconds have passed.

    Args:
        wanted_ranks: number of ranks that trained before, or that the first group expects.
        waited_s: seconds since a group was first asked for.
    """
    possible = min(place_count, sizing.most)
    if possible < sizing.least:
        return None
    return possible if possible >= min(wanted_ranks, sizing.most) or waited_s >= sizing.wait else None


def should_grow(sizing: Sizing, place_count: int, world: int, trained_s: float, unchanged_s: float) -> bool:
    """Return whether the present `world` ranks should make room for more.

    Args:
        place_count: number of ranks that the cluster has places for.
        trained_s: seconds that the present ranks have trained.
        unchanged_s: seconds since the number of places last changed. Machines rarely come alone, so it is worth
            waiting.
    """
    return min(place_count, sizing.most) > world and trained_s >= sizing.grow and unchanged_s >= sizing.wait


def nodes_to_exclude(
    nodes: Sequence[Mapping[str, Any]],
    sizing: Sizing,
    excluded_nodes: frozenset[str],
    bad_nodes: frozenset[str],
) -> frozenset[str]:
    """Return the nodes to exclude: those in `excluded_nodes`, and those of `bad_nodes` that leave at least
    `sizing.least` places."""
    for node in sorted(bad_nodes - excluded_nodes):
        if count_places(nodes, sizing.place, excluded_nodes | {node}) >= sizing.least:
            excluded_nodes |= {node}
    return excluded_nodes


def world_change_cause(sizing: Sizing, before: int, world: int, *, first: bool) -> str:
    """Return why `world` ranks train and no longer `before`, as text for the record. `first`: this is the command's
    first group."""
    if first:
        return "the command was started again"
    if world < before:
        return f"no place for {before} ranks within {sizing.wait:g} s"
    return f"the cluster has places for {world} ranks"
