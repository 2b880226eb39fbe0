"""A home folder that cannot be written, as in containers with a read-only root or another user's id."""

from pathlib import Path

import pytest

from tests.support.runs import small_runs
from tests.support.runs.train_command import output, training

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.long
def test_a_run_needs_no_home_folder(folder: Path) -> None:
    """Not even root can make a folder there."""
    uri = small_runs.new_run(folder, "homeless")
    with training(uri, environment={"HOME": "/proc/no-home"}) as process:
        assert process.wait(300) == 0, output(process)
    assert len(small_runs.losses(uri)) == small_runs.STEPS
