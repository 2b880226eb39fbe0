"""`maskfleet train --without-removed` through Ray: what the command was told reaches the ranks, once and for all."""

from pathlib import Path

import pytest

from launcher.exit_codes import MISTAKE
from launcher.runtime.run.record import open_run
from tests.determinism.test_removed import STOPPED, take_out
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.train_command import kill_everything, output, training, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.long
def test_it_is_told_once_and_killed(folder: Path) -> None:
    calm, run = (small_runs.new_run(folder, name) for name in ("calm", "run"))
    for uri in (calm, run):
        finish(uri, 1, stop_at=STOPPED)
    take_out(folder, seed=3)
    finish(calm, 1, without_removed=True)
    with training(run) as process:
        said = output(process)
        assert process.wait() == MISTAKE, said
    assert "--without-removed" in said
    assert open_run(run).left_out == ()
    with training(run, "--without-removed") as process:
        wait_for(process, lambda: bool(open_run(run).left_out))
        kill_everything(process)
    with training(run) as process:
        said = output(process)
        assert process.wait() == 0, said
    assert [(one.step, one.states) for one in open_run(run).left_out] == [
        (one.step, one.states) for one in open_run(calm).left_out
    ]
    assert small_runs.ledger(run) == small_runs.ledger(calm)
    assert small_runs.digests(run) == small_runs.digests(calm)
