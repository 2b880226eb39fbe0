"""What a run reads is checked when the run is made."""

from pathlib import Path

import pytest

from data_service.errors import CorpusError, UserError
from tests.support.runs.small_runs import new_run


def test_a_source_that_would_never_be_read_is_refused_with_the_weight_that_is_enough(
    inputs: Path, tmp_path: Path
) -> None:
    rare = f"{{uri: {inputs}/corpus, weight: %s}}"
    settings = f"corpus.sources={{text: {rare % 1}, rare: {rare}}}"
    with pytest.raises(CorpusError, match=r"corpus\.sources\.rare .*\bphase 0\b.*\brows\b") as raised:
        new_run(inputs, str(tmp_path / "refused"), settings % "1.0e-7")
    assert "set corpus.sources.rare.weight to 0.0" in raised.value.remedy
    new_run(inputs, str(tmp_path / "run"), settings % "0.5")


@pytest.mark.parametrize("counted", [True, False])
def test_a_source_that_would_be_read_too_often_is_refused(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """By its rows where these are soon counted, else by the tokens of full rows; the limit that is named is enough."""
    if not counted:
        monkeypatch.setattr("launcher.runtime.run.readiness.MAX_COUNTED", 0)
    phase = "{steps: 20, length: 32, batch: {sequences: 12}, mixture: {weights: {text: 1}, most_readings: %s}}"
    with pytest.raises(UserError, match=r"\btext\b.* [\d,]+ tokens\b.*\bread\b") as raised:
        new_run(inputs, str(tmp_path / "refused"), f"phases=[{phase % 2}]")
    enough = raised.value.remedy.split("most_readings to ")[1].split()[0]
    new_run(inputs, str(tmp_path / "run"), f"phases=[{phase % enough}]")
