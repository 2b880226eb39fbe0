"""AWS Batch: a CloudFormation stack with everything that a multi-node parallel job needs, and the job.

The stack's roles may read the S3 locations that the run reads, and write to the run's. They have no other access to S3.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeInt

from data_service.processes import temporary_root
from launcher.app.schedulers.job import (
    Launch,
    PrintableText,
    SizeBytes,
    UnquotedWord,
    require_object_storage,
    run_command,
)
from launcher.app.schedulers.job import render_template as fill
from launcher.errors import LaunchError
from launcher.exit_codes import JOIN_SECONDS, SAVE_SECONDS

if TYPE_CHECKING:  # the module imports torch, which a check of options does not need
    from launcher.runtime.recipe.schema import Recipe

MAX_ATTEMPTS = 10  # largest number of attempts that AWS Batch accepts


@dataclass(frozen=True)
class BucketPrefix:
    """A key prefix in an S3 bucket, without slashes at its ends, that the job may read, and also write if `writes`."""

    bucket: str
    prefix: str
    writes: bool

    @property
    def objects(self) -> str:
        """The end of the objects' ARN: the bucket, and a pattern of the keys."""
        return f"{self.bucket}/{self.prefix}/*" if self.prefix else f"{self.bucket}/*"


class BatchJob(Launch):
    """A CloudFormation stack, and an AWS Batch job in it.

    Attributes:
        image: the container image.
        instance_type: instance type of every node.
        vpc, subnet: network of the nodes. The subnet is private with a route to S3, because multi-node jobs get no
            public address.
        reads: URIs, other than the run's, that training reads; the job may read those in S3.
        efa: number of Elastic Fabric Adapters of the instance type; 0 for plain networking.
        disk: bytes of each machine's disk.
        attempts: largest number of starts.
    """

    image: UnquotedWord
    instance_type: Annotated[str, Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")]
    vpc: Annotated[str, Field(pattern=r"^vpc-([0-9a-f]{8}|[0-9a-f]{17})$")]
    subnet: Annotated[str, Field(pattern=r"^subnet-([0-9a-f]{8}|[0-9a-f]{17})$")]
    reads: tuple[PrintableText, ...] = ()
    efa: NonNegativeInt = 0
    disk: SizeBytes = SizeBytes(200 << 30)
    attempts: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] = MAX_ATTEMPTS

    @property
    def places(self) -> list[BucketPrefix]:
        """The S3 locations that the job's role may access: the run's, and each of `reads` once."""
        others = dict.fromkeys(uri for uri in self.reads if uri.startswith("s3://"))
        return [_bucket_prefix(self.run, writes=True), *(_bucket_prefix(uri, writes=False) for uri in others)]


def input_uris(recipe: "Recipe") -> tuple[str, ...]:
    """Return the URIs that a run of `recipe` reads: corpora, tokenizer, teachers, and the checkpoint that it starts
    from."""
    from launcher.runtime.recipe.corpora import corpora_by_name

    corpora = (source.uri for source in corpora_by_name(recipe).values())
    teachers = (teacher.uri for teacher in recipe.objective.teachers)
    return (*corpora, recipe.tokenizer.uri, *teachers, recipe.start)


def merged_corpus_uris(recipe: "Recipe") -> tuple[str, ...]:
    """Return the URIs of the corpora from which those of `recipe` were merged, and in which their shards lie.

    Raises CorpusError, StoreError: a corpus cannot be read.
    """
    from data_service.corpus.manifest_file import load_manifest
    from data_service.store.open import open_store
    from launcher.runtime.recipe.corpora import corpora_by_name

    manifests = (load_manifest(open_store(source.uri)) for source in corpora_by_name(recipe).values())
    return tuple(part.uri for manifest in manifests for part in manifest.parts)


def render(job: BatchJob) -> str:
    """Return the CloudFormation template.

    Raises:
        LaunchError: the run is not in S3, which is the only storage that the job's roles can access.
    """
    job = require_object_storage(job)
    if not job.run.startswith("s3://"):
        raise LaunchError(
            f"{job.run} is not in S3, and the roles of a job on AWS Batch give access to S3 only",
            remedy="create the run in S3, or launch it on Kubernetes, Slurm or a Ray cluster",
        )
    return fill("aws_batch/stack.yaml", job=job, save_seconds=SAVE_SECONDS, join_seconds=JOIN_SECONDS)


def submit(job: BatchJob) -> str:
    """Create or update the stack, then submit the job, and return its id.

    Raises:
        LaunchError: the run is not in S3, or `aws` is missing or fails.
    """
    with tempfile.TemporaryDirectory(prefix="maskfleet-launch-", dir=temporary_root()) as folder:
        template = Path(folder) / "stack.yaml"
        template.write_text(render(job), "utf-8")
        deploy = [
            "aws",
            "cloudformation",
            "deploy",
            "--stack-name",
            job.name,
            "--template-file",
            str(template),
        ]
        run_command([*deploy, "--capabilities", "CAPABILITY_IAM", "--no-fail-on-empty-changeset"])
    names = ["--job-name", job.name, "--job-queue", job.name, "--job-definition", job.name]
    return run_command(["aws", "batch", "submit-job", *names, "--query", "jobId", "--output", "text"]).strip()


def _bucket_prefix(uri: str, *, writes: bool) -> BucketPrefix:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if set("*?$") & set(uri):
        raise LaunchError(
            f"{uri} contains *, ? or $, which are wildcards or variables in an IAM policy",
            remedy="use a URI without these characters",
        )
    return BucketPrefix(bucket, prefix.strip("/"), writes)
