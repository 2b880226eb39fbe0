"""Slurm: renders a batch script that starts Ray on the job's nodes, and submits it with `sbatch`.

Maskfleet comes from an environment that every node sees at the same path, as is usual on such clusters, or from an
Apptainer image.
"""

import shutil
import sys
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from launcher.app.schedulers.job import Launch, PrintableText, UnquotedWord, matches_pattern, run_command
from launcher.app.schedulers.job import render_template as fill
from launcher.errors import LaunchError
from launcher.exit_codes import JOIN_SECONDS, SAVE_SECONDS

LogPath = Annotated[str, matches_pattern(r"[A-Za-z0-9._:/@=,+%-]+", "letters, digits and ._:/@=,+%-")]
SlurmTime = Annotated[
    str,
    matches_pattern(
        r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}",
        "minutes, HH:MM:SS, D-HH or D-HH:MM:SS, as 24:00:00 and 2-12",
    ),
]
_OPTION_BY_SBATCH_OPTION = {
    "job-name": "--name",
    "nodes": "--nodes",
    "cpus-per-task": "--cpus-per-node",
    "gpus-per-node": "--gpus-per-node",
    "mem": "--memory",
    "time": "--time",
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "constraint": "--constraint",
    "output": "--log",
    "export": "--env",
}
"""Options of `sbatch`, each with the option of `maskfleet launch slurm` that sets it."""
_RESERVED_SBATCH_OPTIONS = {
    "array", "error", "gpus", "mem-per-cpu", "mem-per-gpu", "no-requeue", "ntasks", "ntasks-per-node", "open-mode",
    "parsable", "requeue", "signal", "wrap",
}  # fmt: skip
"""Options of `sbatch` that the script sets itself and relies on."""


def _check_directive(text: str) -> str:
    name = text.removeprefix("--").partition("=")[0]
    if name in _OPTION_BY_SBATCH_OPTION:
        raise ValueError(f"{_OPTION_BY_SBATCH_OPTION[name]} sets this option")
    if name in _RESERVED_SBATCH_OPTIONS:
        raise ValueError("the script sets this option itself and relies on its value")
    return text


SbatchDirective = Annotated[
    str,
    matches_pattern(
        r"--[a-z][a-z0-9-]*(=[A-Za-z0-9._:/@=,+*%&|!()\[\]-]+)?",
        "a long option of sbatch, such as --exclusive or --gres=shard:2, without spaces and quotes",
    ),
    AfterValidator(_check_directive),
]
_SCRIPT_PATH = "/usr/local/bin:/usr/bin:/bin"  # PATH of the script, which does not get the user's own
NODE_LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that are local to each machine."""


class SlurmJob(Launch):
    """A job for `sbatch`.

    Attributes:
        bin: folder of the `maskfleet` command on every node; by default that of this Python.
        log: file for the job's output, in Slurm's file name pattern.
        time: time limit of one start, in Slurm's format; None: the cluster's default.
        partition, account, qos, constraint: options of `sbatch`.
        sbatch: further options of `sbatch`.
        container: Apptainer image that contains Maskfleet; Ray and the run execute in it.
        setup: shell lines that the first node executes before anything else. The other nodes inherit the variables
            that these lines set.
    """

    bin: PrintableText = Field(default_factory=lambda: str(Path(sys.executable).parent))
    log: LogPath = "%x-%j.log"
    time: SlurmTime | None = None
    partition: UnquotedWord | None = None
    account: UnquotedWord | None = None
    qos: UnquotedWord | None = None
    constraint: UnquotedWord | None = None
    sbatch: tuple[SbatchDirective, ...] = ()
    container: PrintableText | None = None
    setup: tuple[PrintableText, ...] = ()

    @property
    def slurm_bin(self) -> str:
        """The folder of Slurm's programs on this machine; empty if it is in the script's PATH, or if there is none."""
        found = str(Path(shutil.which("sbatch") or "/bin/sbatch").parent)
        return "" if found in _SCRIPT_PATH.split(":") else found

    @property
    def placement(self) -> list[tuple[str, str]]:
        """The sbatch options, as (option, value), that choose the nodes and the account to charge."""
        options = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
        }
        return [(option, value) for option, value in options.items() if value is not None]


def require_shared_folder(job: SlurmJob) -> SlurmJob:
    """Return `job` if all its nodes share the run's folder.

    Raises:
        LaunchError: the job has several nodes, and the run lies in a folder that is local to each.
    """
    if job.nodes == 1 or "://" in job.run or not any(Path(job.run).is_relative_to(own) for own in NODE_LOCAL_FOLDERS):
        return job
    raise LaunchError(
        f"{job.run} lies in a folder that is local to each node, and the job has {job.nodes} nodes",
        remedy="create the run in object storage or on a disk that all nodes share: maskfleet init RECIPE RUN",
    )


def render(job: SlurmJob) -> str:
    """Return the batch script."""
    return fill("slurm/job.sh", job=job, path=_SCRIPT_PATH, save_seconds=SAVE_SECONDS, join_seconds=JOIN_SECONDS)


def submit(job: SlurmJob) -> str:
    """Submit the script with `sbatch` and return the job's number.

    Raises:
        LaunchError: `sbatch` is missing or fails.
    """
    return run_command(["sbatch", "--parsable"], stdin=render(job)).split(";")[0].strip()
