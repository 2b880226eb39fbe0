"""`maskfleet launch slurm` on a real Slurm of two nodes: preempted, queued again, finished with the same losses."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.app.schedulers.slurm import SlurmJob, render
from tests.support.clusters.slurm import Slurm, slurm, wait_until
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.train_command import committed

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 200
SETTINGS = (
    f"phases=[{{steps: {STEPS}, length: 32, batch: {{sequences: 12}}}}]",
    "checkpoint={every: {steps: 20}, keep_last: 3}",
    f"evaluation={{every: {{steps: {STEPS}}}, samples: 20}}",
    "trainers={min: 3, max: 3}",  # three quarters of a core each: more than one node of two cores has room for
)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("s")) as running:
        yield running


def submit(cluster: Slurm, uri: str, log: Path, *, nodes: int = 2) -> str:
    """Returns the job's number."""
    job = SlurmJob.of(
        run=uri,
        name="small",
        nodes=nodes,
        gpus=0,
        cpus=2,
        memory="4GiB",
        shared_memory="200MiB",
        bin=str(Path(sys.executable).parent),
        log=str(log),
    )
    return cluster.run("sbatch", "--parsable", stdin=render(job))


def reaches(cluster: Slurm, job: str, uri: str, step: int) -> bool:
    assert cluster.field(job, "JobState") in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
    return committed(uri) >= step


def test_a_job_survives_preemption(cluster: Slurm, tmp_path: Path) -> None:
    small_runs.prepare_corpus(tmp_path)
    uri, log = small_runs.new_run(tmp_path, "run", *SETTINGS), tmp_path / "job.log"
    job = submit(cluster, uri, log)
    wait_until(lambda: reaches(cluster, job, uri, 20), 200)
    cluster.run("scancel", "--batch", "--signal=TERM", job)  # the notice that --signal=B:TERM asks for
    wait_until(lambda: cluster.field(job, "Restarts") == "1", 100)
    stopped_at = committed(uri)
    wait_until(lambda: reaches(cluster, job, uri, stopped_at + 40), 200)
    cluster.run("scontrol", "requeue", job)  # what preemption does, at once and to every process of the job
    wait_until(lambda: cluster.field(job, "JobState") == "COMPLETED", 300)
    assert cluster.field(job, "Restarts") == "2"
    assert committed(uri) == STEPS
    events = small_runs.history(uri).events
    examined = {(event["attempt"], event["node"]) for event in events if event["kind"] == "preflight"}
    assert sorted(attempt for attempt, _ in examined) == [1, 1, 2, 2, 3, 3]  # ranks on both nodes, each time
    written = log.read_text()
    assert "ended with code 75" in written
    assert "start 3, on n[1-2]" in written

    undisturbed = small_runs.new_run(tmp_path, "undisturbed", *SETTINGS)
    finish(undisturbed, 3)
    assert small_runs.losses(uri) == small_runs.losses(undisturbed)
    assert small_runs.final_state(uri, STEPS) == small_runs.final_state(undisturbed, STEPS)


def test_a_mistake_ends_the_job(cluster: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    job = submit(cluster, str(tmp_path / "absent"), log)
    wait_until(lambda: cluster.field(job, "JobState") == "FAILED", 120)
    assert cluster.field(job, "ExitCode") == "2:0"
    assert cluster.field(job, "Restarts") == "0"
    assert "remedy: " in log.read_text()
