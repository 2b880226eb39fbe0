"""A run that lives in object storage entirely: corpus, tokenizer, checkpoints and metrics on Ceph, a fake of Google's
storage, Azurite."""

from pathlib import Path

import pytest

from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.train_command import committed, kill_everything, output, training, wait_for
from tests.support.stores.service import Service

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

LONGER = (
    "phases=[{steps: 60, length: 32, batch: {sequences: 12}}]",
    "checkpoint={every: {steps: 10}, keep_last: 2}",
)


@pytest.mark.long
@pytest.mark.parametrize(
    "server",
    [
        pytest.param("rgw", marks=pytest.mark.rgw),
        "gs",
        pytest.param("az", marks=pytest.mark.azurite),
    ],
)
def test_a_run_survives_the_loss_of_its_machine(request: pytest.FixtureRequest, server: str, tmp_path: Path) -> None:
    service: Service = request.getfixturevalue(server)
    root = f"{service.scheme}://{service.new_bucket()}/here"
    small_runs.prepare_corpus(tmp_path, root)
    uri = small_runs.new_run(root, "run", *LONGER)
    with training(uri) as process:
        wait_for(process, lambda: committed(uri) >= 10)
        kill_everything(process)
    with training(uri) as process:
        assert process.wait(300) == 0, output(process)
    assert committed(uri) == 60
    local = small_runs.new_run(root, "undisturbed", *LONGER)
    finish(local, 2)
    small_runs.ensure_same(uri, local, 60)
