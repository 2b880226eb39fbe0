"""Plain Ray: a cluster on AWS by `ray up`, or one that runs already; training is a Ray job on its head.

Nothing starts the job again here: after code 75, or when the head is lost, launch once more.
"""

import json
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import Field

from launcher.app.schedulers.job import Launch, Size, TrainingJob, Word, checked, needs_object_storage
from launcher.app.schedulers.job import render as fill
from launcher.contract import SAVE_SECONDS

_DASHBOARD = "http://127.0.0.1:8265"


class RayCluster(Launch):
    """A cluster of `nodes` machines on AWS, the head among them.

    Attributes:
        image: the container image.
        region, instance_type, ami: of the machines; Ray knows an image for every region.
        ssh_user: of the machine image.
        profile: ARN of the workers' instance profile; the head gets the one Ray makes, which may start machines.
        spot: workers on spot instances.
        disk: bytes of each machine's disk.
    """

    image: Word
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    instance_type: Annotated[str, Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")]
    ami: Annotated[str, Field(pattern=r"^ami-[0-9a-f]+$")] | None = None
    ssh_user: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")] = "ubuntu"
    profile: Annotated[str, Field(pattern=r"^arn:[A-Za-z0-9:/+=,.@_-]+$")] | None = None
    spot: bool = False
    disk: Size = Size(200 << 30)


def render(job: RayCluster) -> str:
    """The cluster's YAML. Raises LaunchError if the run is not in object storage."""
    return fill("ray_cluster/cluster.yaml", job=needs_object_storage(job), save_seconds=SAVE_SECONDS)


def submission(job: TrainingJob, address: str) -> list[str]:
    """The command that hands the job to the cluster whose dashboard is at `address`."""
    variables = {
        "MASKFLEET_RUN": job.run,
        "MASKFLEET_SETS": "\n".join(job.assignments),
        "MASKFLEET_NODES": str(job.nodes),
    }
    settings = ["--address", address, "--no-wait", "--runtime-env-json", json.dumps({"env_vars": variables})]
    return ["ray", "job", "submit", *settings, "--", "/opt/maskfleet/infra/ray_job"]


def submit(job: RayCluster) -> str:
    """Start or update the cluster, then hand the job to its head; returns what Ray says. Raises LaunchError."""
    with tempfile.TemporaryDirectory(prefix="maskfleet-launch-") as folder:
        cluster = Path(folder) / "cluster.yaml"
        cluster.write_text(render(job), "utf-8")
        checked(["ray", "get-auth-token", "--generate"])  # its answer is the token: it goes nowhere
        checked(["ray", "up", "--yes", "--no-config-cache", str(cluster)])
        return checked(["ray", "exec", str(cluster), shlex.join(submission(job, _DASHBOARD))])


def submit_to(job: TrainingJob, address: str) -> str:
    """Hand the job to a running cluster; returns what Ray says. Raises LaunchError."""
    return checked(submission(needs_object_storage(job), address))
