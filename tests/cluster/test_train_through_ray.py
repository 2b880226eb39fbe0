"""The whole command on a real Ray: ranks, data workers, the feed and everything at once are killed; nothing changes."""

import signal
from pathlib import Path

import pytest

from checkpoints.listing import list_committed
from data_service.store.open import open_store
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.imports_seen import ImportsSeen
from tests.support.runs.train_command import await_commit, committed, kill, kill_everything, output, training, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SETTINGS = (
    "phases=[{steps: 240, length: 32, batch: {sequences: 12}}]",
    "checkpoint={every: {steps: 20}, keep_last: 3}",
    "evaluation={every: {steps: 80}, samples: 20}",
)
STEPS = 240


@pytest.mark.long
@pytest.mark.parametrize("zero", range(4))
def test_whatever_is_killed_nothing_changes(folder: Path, zero: int) -> None:
    """A rank, then the feed and an idle worker, then everything; the end must be as if none of it had happened."""
    undisturbed = finish(small_runs.new_run(folder, f"undisturbed-{zero}", *SETTINGS, f"zero={zero}"), 2)
    uri = small_runs.new_run(folder, f"killed-{zero}", *SETTINGS, f"zero={zero}")
    with training(uri) as process:
        wait_for(process, lambda: committed(uri) >= 20)
        kill(process, "ray::RankProcess as rank")  # a rank
        wait_for(process, lambda: committed(uri) >= 80)
        kill(process, "ray::Feed")  # the owner of all data in flight
        kill(process, "ray::IDLE", optional=True)  # whoever built it
        wait_for(process, lambda: committed(uri) >= 140)
        kill_everything(process)
    with training(uri) as process:
        assert process.wait(300) == 0, output(process)
    small_runs.ensure_same(uri, undisturbed, STEPS)
    kinds = [event["kind"] for event in small_runs.history(uri).events]
    assert kinds.count("resume") == 2
    assert kinds.count("start") == 1
    commits = list_committed(open_store(uri))
    with training(uri) as process:
        assert process.wait(300) == 0, "a finished run is recognised"
    assert list_committed(open_store(uri)) == commits


def test_sigterm_commits_and_asks_for_a_requeue(folder: Path) -> None:
    """Under a name that is no identifier, and without a home folder. Ranks load torch, without its compiler; the driver
    never does."""
    few = ("phases=[{steps: 120, length: 32, batch: {sequences: 12}}]", "checkpoint={every: {steps: 10}}")
    calm = finish(small_runs.new_run(folder, "calm", *SETTINGS, *few), 2)
    uri = small_runs.new_run(folder, "stopped by Zoë's ☂", *SETTINGS, *few)
    homeless = {"HOME": "/proc/no-home"}  # not even root can make a folder there
    driving, training_rank = "launcher.runtime.cluster.train", "launcher.runtime.cluster.worker"
    compiling = ("torch._dynamo", "triton.language")
    seen = ImportsSeen(folder / "imports", ("torch", "deepspeed", *compiling, driving, training_rank))
    with training(uri, environment=homeless | seen.environment) as process:
        wait_for(process, lambda: committed(uri) >= 10)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75, output(process)
    (driver,), ranks = seen.processes(driving), seen.processes(training_rank)
    for library in ("torch", "deepspeed"):
        assert ranks <= seen.processes(library)
        assert not {driver, process.pid} & seen.processes(library)
    assert not any(ranks & seen.processes(library) for library in compiling)
    assert ranks
    stopped_at = committed(uri)
    assert 10 <= stopped_at < 120
    with training(uri, environment=homeless) as process:
        assert process.wait(300) == 0, output(process)
    resumed = [event["step"] for event in small_runs.events(uri, "resume")]
    assert resumed == [stopped_at], "no step was lost"
    small_runs.ensure_same(uri, calm, 120)


@pytest.mark.long
def test_two_starts_at_once(folder: Path) -> None:
    """One works; the other says why it does not, at once, and harms nothing."""
    endless = "phases=[{steps: 1000000, length: 32, batch: {sequences: 12}}]"
    uri = small_runs.new_run(folder, "twice", *SETTINGS, endless)
    with training(uri) as first:
        wait_for(first, lambda: committed(uri) >= 20)
        with training(uri) as second:
            assert second.wait(120) == 2
            text = output(second)
        assert "running" in text
        assert str(first.pid) in text
        assert "Traceback" not in text
        await_commit(first, uri)


@pytest.mark.long
def test_damaged_data_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """No restart can cure it: the command ends, quickly, and names shard and block."""
    small_runs.prepare_corpus(tmp_path)
    uri = small_runs.new_run(tmp_path, "damaged", *SETTINGS)
    shard = next((tmp_path / "corpus").rglob("*.tar"))
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1  # inside the first block: behind the blocks a tar has padding, which training never reads
    shard.write_bytes(data)
    with training(uri) as process:
        assert process.wait(180) == 2
        text = output(process)
    assert shard.name in text
    assert "Traceback" not in text
