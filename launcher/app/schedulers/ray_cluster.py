"""Plain Ray: a cluster on AWS by `ray up`, or a running one. Training is a Ray job on the head node.

Nothing here restarts the job: after exit code 75, or when the head is lost, launch it again.
"""

import json
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import Field

from data_service.processes import temporary_root
from launcher.app.schedulers.job import (
    Launch,
    SizeBytes,
    TrainingJob,
    UnquotedWord,
    require_object_storage,
    run_command,
)
from launcher.app.schedulers.job import render_template as fill
from launcher.exit_codes import SAVE_SECONDS

_DASHBOARD_URL = "http://127.0.0.1:8265"  # Ray's dashboard, for a command that runs on the head node


class RayCluster(Launch):
    """A cluster of `nodes` machines on AWS, including the head.

    Attributes:
        image: the container image.
        region: AWS region.
        instance_type: instance type of every machine.
        ami: machine image; None: Ray's default for the region.
        ssh_user: login user of the machine image.
        profile: ARN of the workers' instance profile. Ray creates the head's profile, which may start machines.
        spot: whether workers are spot instances.
        disk: bytes of each machine's disk.
    """

    image: UnquotedWord
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    instance_type: Annotated[str, Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")]
    ami: Annotated[str, Field(pattern=r"^ami-[0-9a-f]+$")] | None = None
    ssh_user: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")] = "ubuntu"
    profile: Annotated[str, Field(pattern=r"^arn:[A-Za-z0-9:/+=,.@_-]+$")] | None = None
    spot: bool = False
    disk: SizeBytes = SizeBytes(200 << 30)


def render(job: RayCluster) -> str:
    """Return the cluster's YAML. Raises LaunchError if the run is not in object storage."""
    return fill("ray_cluster/cluster.yaml", job=require_object_storage(job), save_seconds=SAVE_SECONDS)


def submission_command(job: TrainingJob, address: str) -> list[str]:
    """Return the command that submits the job to the cluster whose dashboard is at `address`."""
    variables = {
        "MASKFLEET_RUN": job.run,
        "MASKFLEET_SETS": "\n".join(job.assignments),
        "MASKFLEET_NODES": str(job.nodes),
    }
    settings = ["--address", address, "--no-wait", "--runtime-env-json", json.dumps({"env_vars": variables})]
    return ["ray", "job", "submit", *settings, "--", "/opt/maskfleet/infra/ray_job"]


def submit(job: RayCluster) -> str:
    """Start or update the cluster, submit the job to its head, and return Ray's output.

    Raises:
        LaunchError: the run is not in object storage, or `ray` is missing or fails.
    """
    with tempfile.TemporaryDirectory(prefix="maskfleet-launch-", dir=temporary_root()) as folder:
        cluster = Path(folder) / "cluster.yaml"
        cluster.write_text(render(job), "utf-8")
        run_command(["ray", "get-auth-token", "--generate"])  # prints the token, which must not be shown
        run_command(["ray", "up", "--yes", "--no-config-cache", str(cluster)])
        return run_command(["ray", "exec", str(cluster), shlex.join(submission_command(job, _DASHBOARD_URL))])


def submit_to_running_cluster(job: TrainingJob, address: str) -> str:
    """Submit the job to a running cluster and return Ray's output.

    Raises:
        LaunchError: the run is not in object storage, or `ray` is missing or fails.
    """
    return run_command(submission_command(require_object_storage(job), address))
