"""Kubernetes with the KubeRay operator: a RayJob, which makes its RayCluster, and `kubectl`."""

from importlib.metadata import version
from typing import Annotated

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from launcher.app.schedulers.job import Launch, SizeBytes, UnquotedWord, require_object_storage, run_command
from launcher.app.schedulers.job import render_template as fill
from launcher.exit_codes import SAVE_SECONDS

ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]  # name of a Kubernetes object
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$")]  # a label's name or value


def _parse_labels(option_value: object) -> object:
    """Return LABEL=VALUE words as a mapping. A word without `=` gets an empty value, which validation refuses."""
    if isinstance(option_value, list):
        return {label: value for label, _, value in (word.partition("=") for word in option_value)}
    return option_value


Labels = Annotated[dict[Label, Label], BeforeValidator(_parse_labels)]


class KubeRayJob(Launch):
    """A RayJob of `nodes` worker pods and a head.

    Attributes:
        image: the container image.
        namespace: namespace of the job.
        service_account: service account of the pods, which also decides their access to S3.
        secret: name of the Secret whose keys are the variables in `environment`.
        retries: largest number of new clusters, one after each preemption of the head.
        node_selector, head_selector: labels of the machines for workers and for the head.
        head_cpus, head_memory: CPUs and bytes of memory of the head's pod, which only coordinates.
    """

    image: UnquotedWord
    namespace: ObjectName = "default"
    service_account: ObjectName = "default"
    secret: ObjectName = "maskfleet"
    retries: NonNegativeInt = 1000
    node_selector: Labels = Field(default_factory=dict)
    head_selector: Labels = Field(default_factory=dict)
    head_cpus: PositiveInt = 4
    head_memory: SizeBytes = SizeBytes(16 << 30)

    @property
    def driver(self) -> list[tuple[str, str]]:
        """Environment variables of the head's container, for infra/ray_job. No number of nodes is among them, because
        KubeRay itself waits for all pods."""
        return [
            ("MASKFLEET_RUN", self.run),
            ("MASKFLEET_SETS", "\n".join(self.assignments)),
            ("MASKFLEET_FINAL", "stopped"),
            ("RAY_JOB_STOP_WAIT_TIME_S", str(SAVE_SECONDS)),
        ]


def render(job: KubeRayJob) -> str:
    """Return the manifest of the RayJob. Raises LaunchError if the run is not in object storage."""
    job = require_object_storage(job)
    return fill(
        "kuberay/rayjob.yaml",
        job=job,
        save_seconds=SAVE_SECONDS,
        ray_version=version("ray"),
    )


def submit(job: KubeRayJob) -> str:
    """Create the RayJob and return the name that kubectl prints.

    Raises:
        LaunchError: the run is not in object storage, or kubectl is missing or fails, for instance if the name exists.
    """
    return run_command(["kubectl", "create", "--output=name", "--filename=-"], stdin=render(job)).strip()
