"""AWS Batch: a CloudFormation stack with everything a multi-node parallel job needs, and the job.

The stack's roles may read the places that the run reads, and write where the run is; nothing else of S3.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeInt

from launcher.app.schedulers.job import Launch, Printable, Size, Word, checked, needs_object_storage
from launcher.app.schedulers.job import render as fill
from launcher.contract import JOIN_SECONDS, SAVE_SECONDS
from launcher.errors import LaunchError

if TYPE_CHECKING:  # it imports torch, and options are looked at first
    from launcher.runtime.recipe.schema import Recipe

MOST_ATTEMPTS = 10  # AWS's own limit


@dataclass(frozen=True)
class BucketPrefix:
    """A part of a bucket that the job may read, and perhaps write. `prefix` has no slash at either end."""

    bucket: str
    prefix: str
    writes: bool

    @property
    def objects(self) -> str:
        """Bucket and pattern of its objects' keys, as an ARN ends."""
        return f"{self.bucket}/{self.prefix}/*" if self.prefix else f"{self.bucket}/*"


class BatchJob(Launch):
    """A stack and a job of it.

    Attributes:
        image: the container image.
        instance_type: of every node.
        vpc, subnet: where they are; a private subnet with a way to S3, since multi-node jobs get no public address.
        reads: URIs besides the run's that training reads; those in S3 are granted.
        efa: Elastic Fabric Adapters of the instance type, 0 for plain networking.
        disk: bytes of each machine's disk.
        attempts: starts at most.
    """

    image: Word
    instance_type: Annotated[str, Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")]
    vpc: Annotated[str, Field(pattern=r"^vpc-([0-9a-f]{8}|[0-9a-f]{17})$")]
    subnet: Annotated[str, Field(pattern=r"^subnet-([0-9a-f]{8}|[0-9a-f]{17})$")]
    reads: tuple[Printable, ...] = ()
    efa: NonNegativeInt = 0
    disk: Size = Size(200 << 30)
    attempts: Annotated[int, Field(ge=1, le=MOST_ATTEMPTS)] = MOST_ATTEMPTS

    @property
    def places(self) -> list[BucketPrefix]:
        """What the job's role is granted: the run, and every other place in S3 once."""
        others = dict.fromkeys(uri for uri in self.reads if uri.startswith("s3://"))
        return [_place(self.run, writes=True), *(_place(uri, writes=False) for uri in others)]


def reads_of(recipe: "Recipe") -> tuple[str, ...]:
    """URIs that a run of `recipe` reads: corpora, tokenizer, and what it starts from."""
    sources = (source.uri for source in recipe.corpus.sources.values())
    return (*sources, recipe.tokenizer.uri, recipe.start)


def render(job: BatchJob) -> str:
    """The CloudFormation template. Raises LaunchError if the run is not in object storage."""
    job = needs_object_storage(job)
    return fill("aws_batch/stack.yaml", job=job, save_seconds=SAVE_SECONDS, join_seconds=JOIN_SECONDS)


def submit(job: BatchJob) -> str:
    """Create or update the stack, then submit the job; returns its id. Raises LaunchError."""
    with tempfile.TemporaryDirectory(prefix="maskfleet-launch-") as folder:
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
        checked([*deploy, "--capabilities", "CAPABILITY_IAM", "--no-fail-on-empty-changeset"])
    names = ["--job-name", job.name, "--job-queue", job.name, "--job-definition", job.name]
    return checked(["aws", "batch", "submit-job", *names, "--query", "jobId", "--output", "text"]).strip()


def _place(uri: str, *, writes: bool) -> BucketPrefix:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if set("*?$") & set(uri):
        raise LaunchError(
            f"{uri} has a character that means something else in an IAM policy: * ? or $",
            remedy="use a URI without it",
        )
    return BucketPrefix(bucket, prefix.strip("/"), writes)
