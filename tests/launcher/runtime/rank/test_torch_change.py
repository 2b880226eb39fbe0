"""A run that another release of torch goes on with says so, in one line, and goes on."""

from importlib import metadata
from pathlib import Path

import pytest

from checkpoints.listing import list_committed
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import run_group
from tests.support.runs import small_runs

pytestmark = pytest.mark.cluster


def test_a_resume_with_another_torch_says_what_that_means(folder: Path) -> None:
    run = small_runs.new_run(folder, "another-torch")
    assert "goes on where" not in run_group(run, 1, stop_at=3).output
    store = open_run(run).store
    small_runs.with_torch(store, list_committed(store)[0], "2.11.0")
    ended = run_group(run, 1, stop_at=4)
    assert ended.codes == [0]
    (line,) = (line for line in ended.output.splitlines() if "torch 2.11.0 " in line)
    assert f"torch {metadata.version('torch').partition('+')[0]} " in line
