"""`maskfleet launch`: renders a scheduler's job that runs `maskfleet train` on a cluster, and submits it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from launcher.app.cli.options import RunArgument, require_assignments, require_local_path, require_run
from launcher.app.cli.recipe import SetOption

if TYPE_CHECKING:
    from launcher.app.schedulers.job import Launch

_HELP = """
Train a run on a cluster: Slurm, Kubernetes, AWS Batch or plain Ray.

Prints the job, or writes it to a file with --out; submits it with --submit, by the scheduler's own command. The run
must exist. The job contains no secrets: --env only names variables, and the scheduler supplies their values.
"""

group = typer.Typer(no_args_is_help=True, help=_HELP)

ImageOption = Annotated[str, typer.Option("--image", help="The container image, built from infra/Dockerfile.")]
InstanceTypeOption = Annotated[str, typer.Option("--instance-type", help="Instance type of all nodes, head included.")]
DiskOption = Annotated[str, typer.Option("--disk", help="Size of each machine's disk.")]
L = TypeVar("L", bound="Launch")  # class of the job settings of one scheduler
AnyOptions = TypeVar("AnyOptions", bound="JobOptions")  # class of the options of one `launch` command


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The arguments and options that `launch` commands share, named like the fields of the job settings."""

    run: RunArgument
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Number of machines that train.")]
    cpus: Annotated[int, typer.Option("--cpus-per-node", min=1, help="Cores to use on each machine.")]
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            help="Memory to use on each machine: less than it has, since the system needs some.",
        ),
    ]
    gpus: Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs per machine; 0: train on CPUs.")] = 0
    shared_memory: Annotated[
        str,
        typer.Option("--shared-memory", help="Size of /dev/shm on each machine; Ray's object store takes 3/4 of it."),
    ] = "16GiB"
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the job and of its resources. Default: derived from the run's URI."),
    ] = None
    environment: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME", help="Name of an environment variable for the job, without its value."),
    ] = None
    assignments: SetOption = None
    out: Annotated[
        Path | None,
        typer.Option("--out", callback=require_local_path, help="File for the job. Default: standard output."),
    ] = None
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job to the scheduler.")] = False

    def build_job(self, kind: "type[L]") -> "L":
        """Return the job that these options describe. They are checked before the run is opened.

        Raises:
            LaunchError: an option's value is invalid.
            RunError, RecipeError: the run does not exist, or it cannot be trained with these assignments.
        """
        from launcher.app.schedulers.job import job_name

        given = {"name": job_name(self.run)} | {
            name: value for name, value in vars(self).items() if value is not None and name not in ("out", "submit")
        }
        job = kind.from_options(**given | {"run": _absolute_uri(self.run)})
        return kind.from_options(**dict(job) | {"run": _checked_run_uri(self.run, self.assignments)})

    def write_or_submit(self, text: str, submit: Callable[[], str]) -> None:
        """Write the rendered `text` to --out or standard output; with --submit also call `submit`, and print what it
        returns.
        """
        if self.out is not None:
            from launcher.output import write_file

            write_file(self.out, text)
            typer.echo(f"wrote {self.out}", err=True)
        elif not self.submit:
            typer.echo(text, nl=False)
        if self.submit:
            typer.echo(submit())


def with_job_options(command: Callable[[AnyOptions], None]) -> Callable[..., None]:
    """Return `command` with the fields of its parameter `options` as its parameters.

    Typer cannot group options in a class, but it reads a function's signature. Required options come first.
    """
    kind = command.__annotations__["options"]
    fields = sorted(signature(kind).parameters.values(), key=lambda one: one.default is not Parameter.empty)

    @wraps(command)
    def call_with_options(**values: Any) -> None:
        command(kind(**values))

    call_with_options.__signature__ = Signature(fields)  # type: ignore[attr-defined]
    call_with_options.__annotations__ = {one.name: one.annotation for one in fields}
    return call_with_options


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(JobOptions):
    """Options of `launch slurm` alone."""

    time: Annotated[str | None, typer.Option("--time", help="Time limit of one start, in Slurm's format.")] = None
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm's partition.")] = None
    account: Annotated[str | None, typer.Option("--account", help="Slurm account to charge.")] = None
    qos: Annotated[str | None, typer.Option("--qos", help="Slurm's quality of service.")] = None
    constraint: Annotated[
        str | None, typer.Option("--constraint", help="Features that nodes must have, in Slurm's syntax.")
    ] = None
    log: Annotated[str, typer.Option("--log", help="Log file, in Slurm's file name pattern.")] = "%x-%j.log"
    bin: Annotated[
        str | None,
        typer.Option(
            "--bin",
            metavar="FOLDER",
            help="Folder with the `maskfleet` command on every node. Default: that of this command.",
        ),
    ] = None
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="Further option of sbatch: --sbatch=--exclusive. Repeatable."),
    ] = None
    container: Annotated[
        str | None,
        typer.Option("--container", metavar="IMAGE", help="Apptainer image to run in: a .sif file, or docker://NAME."),
    ] = None
    setup: Annotated[
        list[str] | None,
        typer.Option("--setup", metavar="LINE", help="First shell lines: --setup 'module load cuda'. No secrets."),
    ] = None


@group.command()
@with_job_options
def slurm(options: SlurmOptions) -> None:
    """Render a batch script that starts Ray on the job's nodes, saves before preemption, and requeues itself.

    Example: `maskfleet launch slurm s3://bucket/runs/base --nodes 4 --gpus-per-node 8 --cpus-per-node 64
    --memory 900GiB`
    """
    from launcher.app.schedulers import slurm as backend

    job = backend.require_shared_folder(options.build_job(backend.SlurmJob))
    options.write_or_submit(backend.render(job), lambda: f"submitted job {backend.submit(job)}")


@dataclass(frozen=True, kw_only=True)
class KubeRayOptions(JobOptions):
    """Options of `launch kuberay` alone."""

    image: ImageOption
    namespace: Annotated[str, typer.Option("--namespace", help="Kubernetes' namespace of the job.")] = "default"
    service_account: Annotated[
        str, typer.Option("--service-account", help="Service account of the pods, also for access to S3.")
    ] = "default"
    secret: Annotated[str, typer.Option("--secret", help="Secret with the values of --env variables.")] = "maskfleet"
    retries: Annotated[int, typer.Option("--retries", min=0, help="Most new clusters after preemptions.")] = 1000
    node_selector: Annotated[
        list[str] | None, typer.Option("--node-selector", metavar="LABEL=VALUE", help="Label of machines that train.")
    ] = None
    head_selector: Annotated[
        list[str] | None, typer.Option("--head-selector", metavar="LABEL=VALUE", help="Label of the head's machine.")
    ] = None


@group.command()
@with_job_options
def kuberay(options: KubeRayOptions) -> None:
    """Render a RayJob for the KubeRay operator (1.5.1 or newer), which makes a new cluster for every retry.

    Example: `maskfleet launch kuberay s3://bucket/runs/base --image registry/maskfleet:1 --nodes 4 --gpus-per-node 8
    --cpus-per-node 64 --memory 900GiB`
    """
    from launcher.app.schedulers import kuberay as backend

    job = options.build_job(backend.KubeRayJob)
    options.write_or_submit(backend.render(job), lambda: f"created {backend.submit(job)}")


@dataclass(frozen=True, kw_only=True)
class BatchOptions(JobOptions):
    """Options of `launch aws-batch` alone."""

    image: ImageOption
    instance_type: InstanceTypeOption
    vpc: Annotated[str, typer.Option("--vpc", help="The VPC of the machines.")]
    subnet: Annotated[str, typer.Option("--subnet", help="Private subnet with a route to S3, for all machines.")]
    efa: Annotated[int, typer.Option("--efa", min=0, help="Elastic Fabric Adapters per machine.")] = 0
    disk: DiskOption = "200GiB"
    attempts: Annotated[int, typer.Option("--attempts", min=1, max=10, help="Most starts; AWS allows 10.")] = 10


@group.command("aws-batch")
@with_job_options
def aws_batch(options: BatchOptions) -> None:
    """Render a CloudFormation stack with roles, network rules, queue and a multi-node parallel job definition.

    The value of --env NAME is read from the parameter /maskfleet/JOB/NAME of AWS Systems Manager.

    Example: `maskfleet launch aws-batch s3://bucket/runs/base --image ACCOUNT.dkr.ecr.REGION.amazonaws.com/maskfleet:1
    --instance-type p4d.24xlarge --vpc VPC --subnet SUBNET --nodes 4 --gpus-per-node 8 --cpus-per-node 90
    --memory 1000GiB`
    """
    from launcher.app.schedulers import aws_batch as backend

    job = options.build_job(backend.BatchJob)
    from launcher.runtime.recipe.load import with_assignments
    from launcher.runtime.run.record import open_run

    recipe = with_assignments(open_run(options.run).recipe, tuple(job.assignments))
    job = backend.BatchJob.from_options(
        **dict(job) | {"reads": backend.input_uris(recipe) + backend.merged_corpus_uris(recipe)}
    )
    options.write_or_submit(backend.render(job), lambda: f"submitted job {backend.submit(job)}")


@dataclass(frozen=True, kw_only=True)
class RayOptions(JobOptions):
    """Options of `launch ray` alone."""

    image: ImageOption
    region: Annotated[str, typer.Option("--region", help="AWS region.")]
    instance_type: InstanceTypeOption
    ami: Annotated[str | None, typer.Option("--ami", help="Machine image. Default: Ray's for the region.")] = None
    ssh_user: Annotated[str, typer.Option("--ssh-user", help="Login user of the machine image.")] = "ubuntu"
    profile: Annotated[str | None, typer.Option("--worker-profile", help="ARN of the workers' instance profile.")] = (
        None
    )
    spot: Annotated[bool, typer.Option("--spot", help="Run workers on spot instances.")] = False
    disk: DiskOption = "200GiB"


@group.command()
@with_job_options
def ray(options: RayOptions) -> None:
    """Render a Ray cluster on AWS for `ray up`. --submit starts it and submits the job, which is never restarted.

    Example: `maskfleet launch ray s3://bucket/runs/base --image registry/maskfleet:1 --region us-east-1
    --instance-type p4d.24xlarge --nodes 4 --gpus-per-node 8 --cpus-per-node 90 --memory 1000GiB`
    """
    from launcher.app.schedulers import ray_cluster as backend

    job = options.build_job(backend.RayCluster)
    options.write_or_submit(backend.render(job), lambda: backend.submit(job))


@group.command("ray-job")
def ray_job(
    run: RunArgument,
    address: Annotated[str, typer.Option("--address", help="Address of the cluster's dashboard: http://HOST:8265.")],
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Number of nodes to wait for.")] = 1,
    assignments: SetOption = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job to the cluster.")] = False,
) -> None:
    """Render a job for a Ray cluster that runs already, on Maskfleet's image. The cluster must provide environment
    variables and tokens.

    Example: `maskfleet launch ray-job s3://bucket/runs/base --address http://127.0.0.1:8265 --nodes 4 --submit`
    """
    import shlex

    from launcher.app.schedulers import ray_cluster as backend
    from launcher.app.schedulers.job import TrainingJob

    job = TrainingJob.from_options(run=_absolute_uri(run), nodes=nodes, assignments=tuple(assignments or ()))
    job = TrainingJob.from_options(**dict(job) | {"run": _checked_run_uri(run, assignments)})
    if submit:
        typer.echo(backend.submit_to_running_cluster(job, address))
    else:
        typer.echo(shlex.join(backend.submission_command(job, address)))


def _absolute_uri(run: str) -> str:
    return run if "://" in run else str(Path(run).absolute())


def _checked_run_uri(run: str, assignments: list[str] | None) -> str:
    """Return the run's absolute URI.

    Opens the run and applies the assignments, so that mistakes are found before a job waits in a queue.

    Raises:
        RunError: there is no run.
        RecipeError: an assignment is invalid.
    """
    require_assignments(assignments or ())
    require_run(run)
    from launcher.runtime.recipe.load import with_assignments
    from launcher.runtime.run.record import open_run

    opened = open_run(run)
    with_assignments(opened.recipe, tuple(assignments or ()))
    return opened.store.uri
