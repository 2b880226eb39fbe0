"""When a run saves: by count or by time, and where memory is carried, at the next step that needs none."""

from pathlib import Path

import pytest

from checkpoints.attempt import claim
from data_service.store.open import open_store
from launcher.runtime.recipe.schema import Interval
from tests.support.ranks.checkpointers import Silent, keeper_of


def due(folder: Path, every: Interval, grid: int, times: dict[int, float] | None = None) -> list[int]:
    """The steps up to 40 at which a save is due, if none is ever begun; `times`: the clock from a step on."""
    now = [0.0]
    store = open_store(folder)
    keeper = keeper_of(store, claim(store), Silent(), every=every, save_multiple=grid, clock=lambda: now[0])
    found = []
    for step in range(1, 41):
        now[0] = (times or {}).get(step, now[0])
        if keeper.is_due(step):
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("steps", "grid", "expected"),
    [(10, 1, [10, 20, 30, 40]), (10, 5, [10, 20, 30, 40]), (10, 4, [12, 20, 32, 40]), (3, 8, [8, 16, 24, 32, 40])],
)  # fmt: skip
def test_a_multiple_off_the_grid_waits_for_its_next(tmp_path: Path, steps: int, grid: int, expected: list[int]) -> None:
    assert due(tmp_path, Interval(steps=steps), grid) == expected


def test_so_does_the_time(tmp_path: Path) -> None:
    assert due(tmp_path, Interval(minutes=1), 10, {13: 61.0})[0] == 20
