"""Step records summed up in bins: exact where they must be, few however many steps there are."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.observe.inspect.report.summary import Summary
from launcher.runtime.run.history import StepHistory
from launcher.runtime.run.metrics import THROUGHPUT


def steps_of(numbers: np.ndarray, seed: int = 0) -> StepHistory:
    draw = np.random.default_rng(seed)
    n = len(numbers)
    loss = draw.normal(5, 2, n)
    loss[draw.random(n) < 0.1] = np.nan
    columns = {"step": numbers, "mlm_loss": loss, "tokens": draw.integers(1, 9, n).astype(float)}
    return StepHistory.of_columns({**columns, "seconds": draw.uniform(0.5, 2, n), "digest": draw.random(n)})


@given(gaps=st.lists(st.integers(1, 50), max_size=5000), cuts=st.lists(st.integers(0, 5000), max_size=4))
@settings(max_examples=25, deadline=None)
def test_in_one_piece_or_in_many(gaps: list[int], cuts: list[int]) -> None:
    """Sums, counts and extremes are those of the records; the order of arrival changes nothing."""
    numbers = np.cumsum(np.array([0, *gaps], dtype=np.float64))
    steps = steps_of(numbers)
    columns = {name: steps.column(name) for name in steps.fields}
    pieces = Summary.of(StepHistory())
    edges = [0, *sorted(min(cut, len(numbers)) for cut in cuts), len(numbers)]
    for begin, end in pairwise(edges):
        part = {name: values[begin:end] for name, values in columns.items()}
        pieces = pieces.and_then(numbers[begin:end], part, part.__getitem__)
    whole = Summary.of(steps)
    for summary in (whole, pieces):
        assert summary.records == len(numbers)
        assert summary.reached == int(numbers[-1]) + 1
        assert len(summary.first) <= 2001
        assert "digest" not in summary.fields
        known = columns["mlm_loss"][np.isfinite(columns["mlm_loss"])]
        assert summary.total("mlm_loss") == pytest.approx(known.sum())
        curve = summary.curve("mlm_loss")
        assert np.all(np.diff(curve.x) > 0)
        if len(known):
            assert (curve.low.min(), curve.high.max()) == (known.min(), known.max())
            assert np.all((curve.low <= curve.y + 1e-9) & (curve.y <= curve.high + 1e-9))
    np.testing.assert_array_equal(whole.first, pieces.first)
    ours, theirs = (summary.curve(THROUGHPUT.name).y for summary in (whole, pieces))
    np.testing.assert_allclose(ours, theirs)


def test_places_along_tokens_and_hours_are_those_of_the_steps() -> None:
    steps = steps_of(np.arange(1500.0))
    summary = Summary.of(steps, tokens_before=1e6)
    tokens, seconds = np.cumsum(steps.column("tokens")), np.cumsum(steps.column("seconds"))
    done = [0.0, 1.0, 700.0, 1500.0]
    expected = [0.0, tokens[0], tokens[699], tokens[-1]]
    np.testing.assert_allclose(summary.along(done, "tokens"), 1e6 + np.array(expected))
    hours = np.array([0.0, seconds[0], seconds[699], seconds[-1]]) / 3600
    np.testing.assert_allclose(summary.along(done, "hours"), hours)
    np.testing.assert_array_equal(summary.along(done, "steps"), done)
    assert np.all(np.diff(summary.curve("mlm_loss", "tokens").x) > 0)


def test_a_run_without_steps_has_an_empty_summary() -> None:
    summary = Summary.of(StepHistory())
    assert (summary.records, summary.reached, summary.total("loss")) == (0, 0, 0.0)
    assert len(summary.curve("loss", "hours").x) == 0
    np.testing.assert_array_equal(summary.along([3.0], "tokens"), [3.0])
