"""A job for a cluster with any scheduler: its settings, its template, and the command that submits it.

Each scheduler's module adds the settings that only that scheduler needs. No job may contain a secret. Environment
variables and tokens are only named: the scheduler has their values, and its command line tool, which submits the job,
has the user's login. A value in a template of infra/ is a number, or passes through a filter that quotes it.
"""

import json
import re
import shlex
import shutil
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Annotated, Self, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.types import ByteSize, NonNegativeInt

from data_service.printable import control_characters
from data_service.store.open import is_writable_object_store
from launcher.errors import LaunchError


def run_command(command: list[str], stdin: str | None = None) -> str:
    """Run a command and return its output.

    Raises:
        LaunchError: the command is not installed, or it fails; the error then contains the command's message.
    """
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"{command[0]} is not installed on this machine",
            remedy=f"install {command[0]}, or leave out --submit and submit the rendered file from another machine",
        )
    ended = subprocess.run(command, input=stdin, text=True, capture_output=True)
    if ended.returncode:
        words = (ended.stderr or ended.stdout).strip()
        raise LaunchError(
            f"{' '.join(command[:3])} ended with code {ended.returncode}: {words}",
            remedy="correct the cause that the command reports, and launch again",
        )
    return ended.stdout


_CHECKOUT = Path(__file__).parents[3]  # root of the source checkout, if this is not an installed wheel


def template_folder() -> Path:
    """Return the folder of the templates: infra/ of a checkout, or its copy that the wheel installed."""
    if (_CHECKOUT / "pyproject.toml").is_file():
        return _CHECKOUT / "infra"
    for file in metadata.files("maskfleet") or ():
        if file.match("share/maskfleet/infra/ray_node.sh"):
            return Path(str(file.locate())).resolve().parent
    return Path(sysconfig.get_path("data")) / "share" / "maskfleet" / "infra"


def render_template(name: str, **values: object) -> str:
    """Render the template infra/`name`.

    Filters: `shell` quotes a word for a shell, `yaml` quotes any value for YAML, `pod` also escapes `$(X)`, which
    Kubernetes would replace in the value of a pod's variable, and `mib` turns bytes into whole MiB.
    """
    environment = Environment(
        loader=FileSystemLoader(template_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "shell": shlex.quote,
        "yaml": json.dumps,
        "pod": lambda text: json.dumps(text.replace("$(", "$$(")),
        "mib": lambda size: size >> 20,
    }
    return environment.get_template(name).render(**values)


# Job names that Kubernetes and CloudFormation accept, with room for suffixes.
_JOB_NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"


def _require_printable(text: str) -> str:
    if found := control_characters(text):
        raise ValueError(f"the value has control characters: {', '.join(found)}")
    return text


def matches_pattern(pattern: str, accepted: str) -> AfterValidator:
    """Return a check that a text matches `pattern`. `accepted`: the accepted values in words, for the error message."""

    def check_match(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"it takes {accepted}")
        return text

    return AfterValidator(check_match)


PrintableText = Annotated[str, Field(min_length=1), AfterValidator(_require_printable)]
UnquotedWord = Annotated[  # a word that needs no quoting in a shell or in YAML
    str, matches_pattern(r"[A-Za-z0-9][A-Za-z0-9._:/@=,+-]*", "a letter or digit, then letters, digits and ._:/@=,+-")
]
VariableName = Annotated[
    str, matches_pattern(r"[A-Za-z_][A-Za-z0-9_]*", "only the name of a variable, as in --env HF_TOKEN")
]


def _parse_size(option_value: object) -> int:
    try:
        size = TypeAdapter(ByteSize).validate_python(option_value)
    except ValidationError:
        size = ByteSize(0)
    if size < 1 << 20:
        raise ValueError("it takes a size of at least 1MiB, such as 900GiB")
    return int(size)


SizeBytes = Annotated[int, BeforeValidator(_parse_size)]  # bytes, also given as text such as 900GiB
_OPTION_BY_FIELD = {
    "run": "RUN",
    "gpus": "--gpus-per-node",
    "cpus": "--cpus-per-node",
    "environment": "--env",
    "assignments": "--set",
    "profile": "--worker-profile",
}
"""Command line options of fields that are not named like their option."""


class JobSettings(BaseModel):
    """Frozen settings of a job. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def from_options(cls, **values: object) -> Self:
        """Return settings from options of the command line.

        Raises:
            LaunchError: at least one value is invalid; the message lists each such option and what it accepts.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            wrong = [
                (_option_name(e["loc"]), e["msg"].removeprefix("Value error, "), e["input"]) for e in error.errors()
            ]
            raise LaunchError(
                "; ".join(f"{option}: {why}, not {value!r}" for option, why, value in wrong),
                remedy=f"give another value for {', '.join(dict.fromkeys(option for option, _, _ in wrong))}",
            ) from error


def _option_name(field_path: tuple[int | str, ...]) -> str:
    field = str(field_path[0])
    return _OPTION_BY_FIELD.get(field, f"--{field.replace('_', '-')}")


class TrainingJob(JobSettings):
    """The run that a job trains, and its cluster.

    Attributes:
        run: URI of the run.
        nodes: number of machines of the cluster; training waits for all of them.
        assignments: `--set` assignments for `maskfleet train`.
    """

    run: PrintableText
    nodes: PositiveInt
    assignments: tuple[PrintableText, ...] = ()

    @property
    def command(self) -> list[str]:
        """The command that the head node runs."""
        sets = [word for assignment in self.assignments for word in ("--set", assignment)]
        return ["maskfleet", "train", self.run, *sets, "--nodes", str(self.nodes)]


class Launch(TrainingJob):
    """A job that starts its own cluster to train on.

    Attributes:
        name: name of the job, and of the resources created for it.
        gpus, cpus, memory: GPUs, CPUs and bytes of memory of each machine.
        shared_memory: bytes of /dev/shm of each machine; Ray's object store takes three quarters of it.
        environment: names of the job's environment variables; the scheduler supplies their values.
    """

    name: Annotated[str, matches_pattern(_JOB_NAME, "a letter, then up to 39 small letters, digits, inner hyphens")]
    gpus: NonNegativeInt
    cpus: PositiveInt
    memory: SizeBytes
    shared_memory: SizeBytes
    environment: tuple[VariableName, ...] = ()

    @property
    def object_store(self) -> int:
        """Bytes for Ray's object store; NCCL and torch share the rest of /dev/shm."""
        return self.shared_memory * 3 // 4


AnyTraining = TypeVar("AnyTraining", bound=TrainingJob)


def job_name(run: str) -> str:
    """Return a job's name made from the last part of its run's URI: lower case letters, digits and hyphens."""
    last = run.rstrip("/").rsplit("/", 1)[-1].lower()
    cleaned = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:30].strip("-")
    return cleaned if cleaned[:1].isalpha() else f"maskfleet-{cleaned}".rstrip("-")


def require_object_storage(settings: AnyTraining) -> AnyTraining:
    """Return `settings` if the run is in object storage.

    Raises:
        LaunchError: the run lies on a disk.
    """
    if is_writable_object_store(settings.run):
        return settings
    raise LaunchError(
        f"{settings.run} lies on this machine's disk, which the cluster's machines cannot read",
        remedy="create the run in object storage: maskfleet init RECIPE s3://BUCKET/RUN (or gs://, az://)",
    )
