"""`maskfleet launch slurm` on a real Slurm of two nodes: preempted, queued again, finished with the same losses.

Slurm runs on this machine with its own munge key, ports and folder, so that it disturbs nothing else. It needs root and
Debian's slurm-wlm and munge (`apt-get install --no-install-recommends slurm-wlm munge`).
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.app.schedulers.slurm import SlurmJob, render
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.train_command import committed

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=20
InactiveLimit=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerParameters=sched_interval=2
NodeName=n1 NodeHostname=localhost NodeAddr=localhost Port={first} CPUs=2 RealMemory=16000
NodeName=n2 NodeHostname=localhost NodeAddr=localhost Port={second} CPUs=2 RealMemory=16000
PartitionName=main Nodes=n1,n2 Default=YES State=UP MaxTime=INFINITE
"""


@dataclass(frozen=True)
class Slurm:
    """Attributes:
    environment: what its commands must be run with.
    """

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, stdin: str | None = None) -> str:
        ended = subprocess.run(command, input=stdin, env=self.environment, text=True, capture_output=True, timeout=60)
        assert ended.returncode == 0, f"{command}: {ended.stderr}"
        return ended.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """One field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S*)", self.run("scontrol", "show", "job", job))
        assert found, f"a job has no {name}"
        return found[1]


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Skips the test where Slurm cannot run."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a real Slurm needs root and Debian's slurm-wlm and munge; missing: {missing}")
    (folder / "state").mkdir()
    configuration = folder / "slurm.conf"
    controller, first, second = _free_ports(3)
    configuration.write_text(_CONFIGURATION.format(folder=folder, controller=controller, first=first, second=second))
    here = Slurm(folder, os.environ | {"SLURM_CONF": str(configuration)})
    with ExitStack() as daemons:
        daemons.enter_context(_munge(folder))
        daemons.enter_context(_daemon(here, "slurmctld", "-D"))
        for node in ("n1", "n2"):
            daemons.enter_context(_daemon(here, "slurmd", "-D", "-N", node))
        wait_until(lambda: here.run("sinfo", "--noheader", "--format=%T %D") == "idle 2", 60)
        try:
            yield here
        finally:
            here.run("scancel", "--quiet", "--full", "--signal=KILL", "--user=root")
            here.run("scancel", "--quiet", "--user=root")
            wait_until(lambda: not here.run("squeue", "--noheader"), 60)


@contextmanager
def _munge(folder: Path) -> Iterator[None]:
    key, place = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    folder.chmod(0o755)
    files = (f"--key-file={key}", f"--socket={place}", f"--log-file={folder}/munged.log")
    more = (f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed")
    with _process(["munged", "--foreground", "--force", *files, *more], dict(os.environ), folder / "munged.out"):
        wait_until(place.exists, 20)
        yield


@contextmanager
def _daemon(here: Slurm, *command: str) -> Iterator[None]:
    with _process(list(command), here.environment, here.folder / f"{'-'.join(command)}.out"):
        yield


@contextmanager
def _process(command: list[str], environment: dict[str, str], output: Path) -> Iterator[None]:
    with output.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    tick, deadline = threading.Event(), time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        tick.wait(0.2)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


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


def submit(cluster: Slurm, uri: str, log: Path, *, setup: tuple[str, ...] = ()) -> str:
    """Returns the job's number."""
    job = SlurmJob.from_options(
        run=uri,
        name="small",
        nodes=2,
        gpus=0,
        cpus=2,
        memory="4GiB",
        shared_memory="200MiB",
        bin=str(Path(sys.executable).parent),
        log=str(log),
        setup=setup,
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
    small_runs.ensure_same(uri, undisturbed, STEPS)


def test_a_mistake_ends_the_job(cluster: Slurm, tmp_path: Path) -> None:
    """Also after a step of its own setup, as one that unpacks an archive on every node."""
    log, unpacked = tmp_path / "job.log", tmp_path / "unpacked"
    job = submit(cluster, str(tmp_path / "absent"), log, setup=(f"srun --export=ALL --ntasks=2 mkdir -p {unpacked}",))
    wait_until(lambda: cluster.field(job, "JobState") == "FAILED", 120)
    assert cluster.field(job, "ExitCode") == "2:0"
    assert cluster.field(job, "Restarts") == "0"
    assert "remedy: " in log.read_text()
    assert unpacked.is_dir()
