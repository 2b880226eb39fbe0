"""A real Slurm of two nodes on this machine: its own munge key, ports and folder, so that it disturbs nothing else.

Needs root and Debian's slurm-wlm and munge (`apt-get install --no-install-recommends slurm-wlm munge`).
"""

import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

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
        ended = subprocess.run(
            command, input=stdin, env=self.environment, text=True, capture_output=True, timeout=60
        )
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
    configuration.write_text(
        _CONFIGURATION.format(folder=folder, controller=controller, first=first, second=second)
    )
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
    with _process(
        ["munged", "--foreground", "--force", *files, *more], dict(os.environ), folder / "munged.out"
    ):
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
