"""`tests/bench/mup.py` finds the best rate of each width, and a trial of it learns."""

from pathlib import Path

import mup
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.app.cli.demo_path import write_jsonl

WIDTHS, POWERS = (64, 128, 256, 512), tuple(range(-11, -4))


@given(st.floats(-9.9, -6.1), st.floats(-1.0, 0.2))
def test_the_vertex_of_a_parabola_is_found_wherever_it_moves(first: float, a_doubling: float) -> None:
    """Where not all rates are tried, too, and beyond the rates of the grid."""
    places = {width: first + a_doubling * i for i, width in enumerate(WIDTHS)}
    asked: list[tuple[int, int]] = []

    def measure(width: int, power: int) -> float:
        asked.append((width, power))
        return 3.0 + 0.1 * (power - places[width]) ** 2

    found = mup.search(mup.Grid(WIDTHS, POWERS, bracket_from=256), measure)
    for width in (256, 512):
        assert mup.place(found[width]) == pytest.approx(places[width]), found[width]
        assert mup.best(found[64]) in found[width]
    assert mup.place(found[64]) == pytest.approx(places[64])
    assert set(found[128]) == set(POWERS)


def test_a_rate_at_the_edge_or_beside_a_diverged_one_is_taken_as_it_is() -> None:
    assert mup.place({-3: 2.0, -2: 1.5}) == -2.0
    assert mup.place({-3: 1.6, -2: 1.5, -1: float("inf")}) == -2.0


@pytest.mark.long
def test_a_small_bench_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "text.jsonl")
    settings = {"width": [32, 64], "lowest": -9, "highest": -7, "steps": 20, "rows": 4, "vocabulary": 400}
    for _ in range(2):
        mup.main([str(tmp_path / "text.jsonl")], tmp_path / "out", optimizer="muon", **settings)  # type: ignore[arg-type]
    first, second = capsys.readouterr().out.split("| muon ")[1:]
    assert first == second, "what is measured is read back"
    assert first.count("| without |") == first.count("| muP |") == 2
