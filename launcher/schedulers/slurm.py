"""Slurm: a batch script that starts Ray on the job's nodes, and `sbatch`.

Maskfleet is taken from an environment that every node sees at the same path, as is usual on such clusters.
"""

from typing import Annotated

from pydantic import Field

from launcher.contract import JOIN_SECONDS, SAVE_SECONDS
from launcher.schedulers.job import Launch, Printable, Word, checked
from launcher.schedulers.job import render as fill

LogPath = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/@=,+%-]+$")]


class SlurmJob(Launch):
    """A job for `sbatch`.

    Attributes:
        bin: the folder of the `maskfleet` command, on every node.
        log: where its output goes, in Slurm's own pattern.
        time: the limit of one start, as Slurm spells it; the cluster's default if absent.
        partition, account, qos, constraint: as for `sbatch`.
    """

    bin: Printable
    log: LogPath = "%x-%j.log"
    time: Annotated[str, Field(pattern=r"^[0-9][0-9:-]*$")] | None = None
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None

    @property
    def placement(self) -> list[tuple[str, str]]:
        """Where it runs and on whose account: (option, value)."""
        options = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
        }
        return [(option, value) for option, value in options.items() if value is not None]


def render(job: SlurmJob) -> str:
    """The batch script."""
    return fill("slurm/job.sh", job=job, save_seconds=SAVE_SECONDS, join_seconds=JOIN_SECONDS)


def submit(job: SlurmJob) -> str:
    """Hand it to `sbatch`; returns the job's number. Raises LaunchError."""
    return checked(["sbatch", "--parsable"], stdin=render(job)).split(";")[0].strip()
