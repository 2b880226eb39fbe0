"""What the driver hands every rank once it has its seat. To read it loads torch, so it is in no module that the actor
of a rank needs before (`launcher.runtime.cluster.rank_process`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_service.service.feed import FeedHandle
from launcher.runtime.recipe.schema import Recipe


@dataclass(frozen=True)
class Assignment:
    """What the driver hands every rank."""

    run_uri: str
    coordinator: Any
    feed: FeedHandle
    recipe: Recipe
    save_multiple: int  # a pause falls on multiples of so many steps
    before: Mapping[str, float]  # seconds that the start has taken so far, by part
