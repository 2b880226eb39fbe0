"""The assignment that the driver sends to every rank with its seat.

Apart from `orders`, because a recipe's schema takes a second to import. The module of the ranks' actor
(`launcher.runtime.cluster.rank_process`) does not import this one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_service.service.feed import FeedHandle
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.removals import CorpusStates


@dataclass(frozen=True)
class Assignment:
    """The data that the driver hands every rank."""

    run_uri: str
    feed: FeedHandle
    recipe: Recipe
    save_multiple: int  # a pause is only allowed after a multiple of so many steps
    removals: CorpusStates  # removed documents; recorded at the step from which the run resumes
    before: Mapping[str, float]  # seconds that each part of the start has taken so far, by the part's name
    # The keeper of states in memory on each node, by the node's id; empty without copies.
    keepers: Mapping[str, Any]
    # Whether keepers may hold states of an earlier group of this command.
    remembers: bool
    # How many of the group's processes stayed from the last group, were spares, are new.
    processes: Mapping[str, int]
