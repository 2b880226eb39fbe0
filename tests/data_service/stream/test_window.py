"""Slabs: every sample of a window in one of them, found again by arithmetic, whatever steps they are laid for."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.service.prefetch import AnnouncedWindows
from data_service.stream.plan import EpochLayout
from data_service.stream.stream import SlabLayout, StepStart

layouts = st.builds(
    lambda quotas, windows, window, epoch, rows, steps: SlabLayout.for_window(
        EpochLayout(tuple(quotas), windows, 1), epoch, window % windows, rows=rows, steps=steps
    ),
    st.lists(st.integers(8, 60), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(0, 7),
    st.integers(0, 5),
    st.integers(1, 40),
    st.none() | st.builds(StepStart, st.integers(1, 50), st.integers(0, 5), st.integers(0, 200)),
)


@given(layouts)
def test_every_sample_lies_in_one_slab(layout: SlabLayout) -> None:
    slabs = [layout.slab_positions(slab) for slab in range(layout.slab_count)]
    assert all(len(slab) for slab in slabs)
    assert sorted(np.concatenate(slabs).tolist()) == list(range(layout.size))


@given(layouts, st.data())
def test_any_range_is_found_in_its_slabs(layout: SlabLayout, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, layout.size))
    last = data.draw(st.integers(first, layout.size))
    slabs = [layout.slab_positions(slab) for slab in range(layout.slab_count)]
    pieces = list(layout.iter_slab_ranges(first, last))
    found = [position for slab, start, stop in pieces for position in slabs[slab][start:stop].tolist()]
    assert found == list(range(first, last))
    assert set(layout.slabs_with_samples(first, last)) == {slab for slab, _, _ in pieces}


@given(st.integers(1, 12), st.integers(0, 3), st.integers(0, 500), st.integers(1, 40))
def test_a_share_of_every_step_lies_in_few_slabs(ranks: int, epoch: int, sample: int, rows: int) -> None:
    """Whatever the window and wherever steps begin: the rows of one rank are in as many slabs as those of one step."""
    share, grid = 6, EpochLayout((4000,), 3, 1)
    steps = StepStart(share * ranks, 0, sample)
    for window in range(3):
        layout = SlabLayout.for_window(grid, epoch, window, rows=rows, steps=steps)
        origin = epoch * 4000 + grid.window_start(window)
        first = -(-(origin - sample) // steps.rows) * steps.rows + sample - origin  # the first step that begins here
        mine = [
            (start + 2 * (ranks - 1), start + 2 * (ranks - 1) + share)
            for start in range(first, layout.size - steps.rows, steps.rows)
        ]
        needed = [layout.slabs_with_samples(*part) for part in mine]
        assert all(slabs == needed[0] for slabs in needed)
        assert len(needed[0]) <= share // layout.stripe + 2


@pytest.mark.long
def test_as_many_reads_as_a_long_run_has_cost_the_same_each() -> None:
    """While memory is full, what comes next is looked at by every read: 400,000 of them ended the process once."""

    def spans() -> Iterator[tuple[tuple[int, int], int, int]]:
        for number in range(10):
            yield (0, number), 0, 10

    began = time.process_time()
    announced = AnnouncedWindows(spans(), 2, lambda window: SlabLayout.from_slab_rows(10, 5))
    for _ in range(500_000):
        announced.advance_past({(0, 0)})
    assert list(announced.windows) == [(0, 0), (0, 1)]
    announced.advance_past({(0, 1)})
    assert list(announced.windows) == [(0, 1), (0, 2)]
    assert time.process_time() - began < 60


def test_a_window_with_another_layout_than_was_thought() -> None:
    thought, built = SlabLayout.from_slab_rows(100, 10), SlabLayout(100, 20, 0, 2)
    announced = AnnouncedWindows([((0, 0), start, start + 2) for start in (4, 24, 44)], 2, lambda window: thought)
    announced.advance_past(set())
    part = announced.windows[0, 0]
    assert list(part.slabs) == [0, 2, 4]
    part.replace_layout(built)
    assert list(part.slabs) == [2]
