"""A comparison's folder or s3:// URI.

comparison.json           what was asked for last
runs/LABEL-SEED/          the runs, as `maskfleet init` and `train` make them
measured/3f2a....json     held-out figures of last checkpoints under one recipe's masks
compare.html, compare.json    the page, and the same for programs
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.formats import REMEDY, is_newer, newer
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from launcher.after.compare.plan import Arm, arm_of
from launcher.errors import CompareError
from launcher.runtime.recipe.load import loads
from launcher.runtime.run.record import RECORD, Run, open_run

_ASKED = "comparison.json"
PAGE, FIGURES = "compare.html", "compare.json"


class _Asked(BaseModel):
    """The content of comparison.json: each recipe's YAML by label, the seeds, and the budget as it was given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    recipes: dict[str, str]
    seeds: tuple[int, ...]
    budget: str | None


@dataclass(frozen=True)
class Comparison:
    """A comparison of recipes.

    Attributes:
        store: store of all its runs and results.
        arms: the compared recipes; the others are compared with the first.
        seeds: seeds of the runs; each arm has a run with each seed.
        budget: the budget as it was given; None: that of the recipes.
    """

    store: Store
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    budget: str | None

    def uri(self, label: str, seed: int) -> str:
        """Return where a run lies."""
        return f"{self.store.uri.rstrip('/')}/runs/{label}-{seed}"

    def run(self, label: str, seed: int) -> Run | None:
        """Return the run of an arm with a seed; None if it was not created yet. Raises StoreError, RunError."""
        uri = self.uri(label, seed)
        return None if open_store(uri).size(RECORD) is None else open_run(uri)

    def keep(self) -> None:
        """Store the request, which replaces the previous one. Raises StoreError; CompareError if a newer version wrote
        the previous one."""
        with suppress(KeyMissing):
            data = self.store.get(_ASKED)
            if is_newer(data, known=1, error=_problem(data)):
                raise CompareError(newer(f"{self.store.uri.rstrip('/')}/{_ASKED}"), remedy=REMEDY)
        recipes = {arm.label: arm.recipe.to_yaml() for arm in self.arms}
        asked = _Asked(recipes=recipes, seeds=self.seeds, budget=self.budget)
        self.store.put(_ASKED, asked.model_dump_json(indent=1).encode())


def _problem(data: bytes) -> ValidationError | None:
    """Return what is wrong with the bytes of comparison.json."""
    try:
        _Asked.model_validate_json(data)
    except ValidationError as error:
        return error
    return None


def comparison_at(uri: str, arms: Sequence[Arm], seeds: Sequence[int], budget: str | None) -> Comparison:
    return Comparison(open_store(uri), tuple(arms), tuple(seeds), budget)


def open_comparison(uri: str) -> Comparison:
    """Return the comparison at `uri`, as it was last requested. Raises CompareError if there is none; StoreError, and
    the errors of `init`."""
    store = open_store(uri)
    data = b""
    try:
        data = store.get(_ASKED)
        asked = _Asked.model_validate_json(data)
    except (KeyMissing, ValidationError) as error:
        if is_newer(data, known=1, error=_problem(data)):
            raise CompareError(newer(f"{uri.rstrip('/')}/{_ASKED}"), remedy=REMEDY) from error
        raise CompareError(
            f"there is no comparison at {uri}, or its {_ASKED} is damaged",
            remedy="give the command with its recipes",
        ) from error
    arms = [arm_of(label, loads(text, label)) for label, text in asked.recipes.items()]
    return Comparison(store, tuple(arms), asked.seeds, asked.budget)
