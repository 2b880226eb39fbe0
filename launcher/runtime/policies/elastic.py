"""Elastic training: how many ranks train, given the operator's limits and the cluster's machines.

The batch does not depend on the number of ranks, because microbatches are distributed over the ranks there are. The
driver calls these pure functions whenever a group of ranks may start or grow.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from data_service.formats import StrictRecord


class Trainers(StrictRecord):
    """Limits of the number of ranks (data-parallel processes) of a run, which may change while it trains.

    Attributes:
        min: smallest number of ranks. If the cluster holds fewer, the run waits for machines.
        max: largest number of ranks. "auto": one for every GPU of the cluster; without GPUs, one for each core of this
            machine, at most two.
        wait: seconds that training waits for a lost machine to return before it goes on with fewer ranks. Also the
            seconds for which the cluster must be unchanged before training is stopped to add ranks.
        grow: seconds that a group of ranks trains before it may be stopped, at a checkpoint, to add ranks.
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
        each: amount that one rank reserves on its node, by the name of the Ray resource.
        data_cpus: CPUs that a node must have for data tasks, for each of its ranks.
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
        """Amount of each Ray resource that a node must have for one rank and its data tasks."""
        return {name: amount + (self.data_cpus if name == "CPU" else 0.0) for name, amount in self.each.items()}


@dataclass(frozen=True)
class GroupStart:
    """A decision to start a group of `ranks` ranks, on any nodes except `without`. `frugal`: to save memory, without
    in-memory copies of the state and without spare processes. `number`: the group's number within this command."""

    ranks: int
    without: frozenset[str]
    frugal: bool = False
    number: int = field(default=0, compare=False)


def count_places(nodes: Iterable[Mapping[str, Any]], place: Mapping[str, float], excluded_nodes: Container[str]) -> int:
    """Return how many ranks fit on the living nodes among `nodes` (`ray.nodes()`) without `excluded_nodes`. `place`:
    resources that one rank needs (`Sizing.place`)."""
    return sum(
        min(int(node["Resources"].get(name, 0) // amount) for name, amount in place.items())
        for node in nodes
        if node["Alive"] and node["NodeID"] not in excluded_nodes
    )


def rank_count(sizing: Sizing, place_count: int, wanted_ranks: int, waited_s: float) -> int | None:
    """Return how many ranks to start when `place_count` ranks fit on the cluster; None: wait longer.

    As many ranks start as fit, from `sizing.least` to `sizing.most`. Fewer than `wanted_ranks` start only after
    `sizing.wait` seconds.

    Args:
        wanted_ranks: number of ranks of the last group; for the first group, `sizing.expected`.
        waited_s: seconds that the group has waited to start.
    """
    possible = min(place_count, sizing.most)
    if possible < sizing.least:
        return None
    return possible if possible >= min(wanted_ranks, sizing.most) or waited_s >= sizing.wait else None


def should_grow(sizing: Sizing, place_count: int, world: int, trained_s: float, unchanged_s: float) -> bool:
    """Return whether the present `world` ranks should stop so that a larger group can start.

    Args:
        place_count: number of ranks that fit on the cluster.
        trained_s: seconds that the present ranks have trained.
        unchanged_s: seconds since `place_count` last changed. New machines often come several at a time.
    """
    return min(place_count, sizing.most) > world and trained_s >= sizing.grow and unchanged_s >= sizing.wait


def nodes_to_exclude(
    nodes: Sequence[Mapping[str, Any]],
    sizing: Sizing,
    excluded_nodes: frozenset[str],
    bad_nodes: frozenset[str],
) -> frozenset[str]:
    """Return `excluded_nodes` and as many of `bad_nodes` as can be excluded while `sizing.least` ranks still fit on the
    other nodes."""
    for node in sorted(bad_nodes - excluded_nodes):
        if count_places(nodes, sizing.place, excluded_nodes | {node}) >= sizing.least:
            excluded_nodes |= {node}
    return excluded_nodes


def world_change_cause(sizing: Sizing, before: int, world: int, *, first: bool) -> str:
    """Return why the number of ranks changed from `before` to `world`, as text for the event. `first`: whether this is
    the command's first group."""
    if first:
        return "the command was started again"
    if world < before:
        return f"no place for {before} ranks within {sizing.wait:g} s"
    return f"the cluster has places for {world} ranks"
