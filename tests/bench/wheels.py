"""What README's line installs where, asked of the package index: python tests/bench/wheels.py.

pip resolves the line for versions of Python and processors that need not be here: Linux with glibc 2.28 or newer,
wheels only. It reads metadata and downloads nothing else. The index that pip is configured for is asked; local folders,
further indexes and constraints, from which a build without CUDA may come, are not. What the index holds as source only
is built here first. `--write` puts the table into the guide (infra/docs/clusters.md).
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from program import BenchError, note, run

ROOT = Path(__file__).parents[2]
README, DOCKERFILE = ROOT / "README.md", ROOT / "infra/Dockerfile"
CONSTRAINTS, GUIDE = ROOT / "infra/constraints.txt", ROOT / "infra/docs/clusters.md"
TESTED = Path(__file__).with_name("tested.yaml")
PYTHONS, MACHINES = ("3.11", "3.12", "3.13"), ("x86_64", "aarch64")
GLIBC = 28  # the oldest 2.x that torch's wheels take
SOURCES = ("deepspeed", "jieba", "seqeval")
"""The index holds these as source only, without anything to compile."""
CUDAS = ("nvidia-", "cuda-")
"""How the names of what torch's CUDA wheel brings begin."""
SHOWN = (
    "torch",
    "triton",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "ray",
    "pyarrow",
    "numpy",
)
MARKS = ("<!-- wheels -->", "<!-- /wheels -->")
_KEPT = frozenset({"index-url", "cert", "client-cert", "proxy", "trusted-host"})
_NEEDED = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "infra",
    "encoder_core",
    "data_service",
    "checkpoints",
    "launcher",
)
# pip takes wheels' tags from its options, and markers (`python_version < "3.12"`) from the Python that runs it.
_PIP = """
import sys
from pip._vendor.packaging import markers
here = markers.default_environment
markers.default_environment = lambda: {**here(), **%r}
from pip._internal.cli.main import main
sys.exit(main(%r))
"""


@dataclass(frozen=True)
class Place:
    """Where is installed: a version of CPython, and a processor as `uname -m` names it."""

    python: str
    machine: str

    @property
    def markers(self) -> dict[str, str]:
        version = {"python_version": self.python, "python_full_version": f"{self.python}.0"}
        return version | {"platform_machine": self.machine}

    @property
    def options(self) -> list[str]:
        """pip's: wheels for this place alone."""
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(5, GLIBC + 1)]
        platforms = [part for tag in (*tags, f"manylinux2014_{self.machine}") for part in ("--platform", tag)]
        return ["--only-binary=:all:", "--python-version", self.python, *platforms]


@dataclass(frozen=True)
class Resolved:
    """What pip would install.

    Attributes:
        versions: by normalised name. requires: each one's requirements, as its metadata has them.
        addresses: of the files, those of the index alone.
    """

    place: Place
    versions: Mapping[str, str]
    requires: Mapping[str, Sequence[str]]
    addresses: Sequence[str]


def readme_line() -> list[str]:
    """What README tells a user with a GPU to type, without `pip install`."""
    return _arguments(README, r"^pip install (-c .*)$")


def dockerfile_line() -> list[str]:
    """What the image's build runs, without `pip install`."""
    return _arguments(DOCKERFILE, r"^RUN pip install (.*)$")


def _arguments(file: Path, pattern: str) -> list[str]:
    (line,) = re.findall(pattern, file.read_text("utf-8"), re.MULTILINE)
    return shlex.split(line, comments=True)


def pins() -> dict[str, str]:
    """The lock's versions, by normalised name."""
    lines = [line.split("==") for line in CONSTRAINTS.read_text("utf-8").splitlines()]
    return {canonicalize_name(name): version for name, version in lines}


def unreachable() -> str | None:
    """Why the index cannot be asked; None if it answers."""
    asked = _pip("index", "versions", "triton", "--retries", "0", "--timeout", "20")
    return None if asked.returncode == 0 else asked.stderr.strip().splitlines()[-1]


def copy_sources(folder: Path) -> None:
    """What an installation from the clone is built of."""
    for part in _NEEDED:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)


@contextmanager
def sources() -> Iterator[Path]:
    """A copy of what is installed from, since building leaves files beside it. Its folder `wheels` holds what is a
    source on the index. Raises BenchError if this pip would download what it resolves."""
    if Version(metadata.version("pip")) < Version("26"):
        raise BenchError(
            "pip is older than 26, and downloads what it resolves", remedy="infra/test installs a newer one"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder)
        wanted = [f"{name}=={pins()[name]}" for name in SOURCES]
        _checked(_pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder / "wheels"), *wanted))
        yield folder


def resolve(place: Place, arguments: Sequence[str], folder: Path) -> Resolved:
    """`pip install ARGUMENTS` in `folder` (see `sources`) at a place. Raises BenchError if it cannot be resolved."""
    report = folder / f"{place.python}-{place.machine}.json"
    reading = ["--dry-run", "--ignore-installed", "--no-build-isolation", "--use-feature=fast-deps"]
    given = [
        "--quiet",
        "--find-links",
        "wheels",
        "--report",
        str(report),
        *reading,
        *place.options,
        *arguments,
    ]
    _checked(_pip("install", *given, markers=place.markers, folder=folder))
    found = json.loads(report.read_text("utf-8"))
    assert found["environment"].items() >= place.markers.items()
    installed = {canonicalize_name(one["metadata"]["name"]): one for one in found["install"]}
    addresses = [one["download_info"]["url"] for one in installed.values()]
    return Resolved(
        place,
        {name: one["metadata"]["version"] for name, one in installed.items()},
        {name: one["metadata"].get("requires_dist", []) for name, one in installed.items()},
        [address for address in addresses if not address.startswith("file:")],
    )


def lock(torch: str) -> dict[str, str]:
    """The lock's versions with any torch of `tested.yaml`, by normalised name. Which libraries of CUDA another one than
    the lock's brings is left to pip."""
    (tested,) = (one for one in yaml.safe_load(TESTED.read_text("utf-8"))["torch"] if one["release"] == torch)
    if torch == pins()["torch"]:
        return pins()
    kept = {name: version for name, version in pins().items() if not name.startswith(CUDAS)}
    return kept | {name: tested[name] for name in ("triton", "transformers") if name in tested} | {"torch": torch}


def required(found: Resolved, name: str, by: str) -> SpecifierSet | None:
    """The releases of `name` that `by` requires at this place; None if it requires none."""
    for requirement in map(Requirement, found.requires[by]):
        marker = requirement.marker
        if requirement.name == name and (marker is None or marker.evaluate(found.place.markers)):
            return requirement.specifier
    return None


def size(addresses: Iterable[str]) -> int:
    """Bytes of the files."""

    def ask(address: str) -> int:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=60) as answer:
            return int(answer.headers["Content-Length"])

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(ask, addresses))


def _pip(
    *arguments: str, markers: Mapping[str, str] | None = None, folder: Path = ROOT
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", _PIP % (dict(markers or {}), list(arguments))]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def _checked(ran: "subprocess.CompletedProcess[str]") -> None:
    if ran.returncode:
        raise BenchError(f"pip: {ran.stderr.strip()}", remedy="mend infra/constraints.txt or pyproject.toml")


def environment() -> dict[str, str]:
    """Variables for a pip that knows the index and the way to it, and nothing else of this machine's configuration."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    settings = dict(line.split("=", 1) for line in listing.splitlines())
    kept = {
        "PIP_" + name.upper().replace("-", "_"): value.strip("'\"")
        for key, value in settings.items()
        if (name := key.rpartition(".")[2]) in _KEPT
    }
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return ours | kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def render(found: Sequence[Resolved], sizes: Mapping[str, int]) -> str:
    """A table in markdown: a column for each processor, whose releases are the same for every Python."""
    lines = ["| |" + "".join(f" {machine} |" for machine in sizes), "|---|" + "---|" * len(sizes)]
    rows = {"CPython": {machine: [x.place.python for x in _of(found, machine)] for machine in sizes}}
    for name in SHOWN:
        rows[name] = {machine: [x.versions[name] for x in _of(found, machine)] for machine in sizes}
    for name, cells in rows.items():
        lines.append(f"| {name} |" + "".join(f" {', '.join(dict.fromkeys(cells[x]))} |" for x in sizes))
    lines.append("| packages |" + "".join(f" {len(_of(found, x)[0].versions)} |" for x in sizes))
    lines.append("| download |" + "".join(f" {size / 1e9:.1f} GB |" for size in sizes.values()))
    return "\n".join(lines)


def _of(found: Sequence[Resolved], machine: str) -> list[Resolved]:
    return [one for one in found if one.place.machine == machine]


def table() -> str:
    """Asks for every place."""
    found = []
    with sources() as folder:
        for place in (Place(python, machine) for machine in MACHINES for python in PYTHONS):
            note(f"CPython {place.python} on {place.machine}")
            found.append(resolve(place, readme_line(), folder))
    return render(found, {machine: size(_of(found, machine)[0].addresses) for machine in MACHINES})


def written() -> str:
    """The guide's table."""
    return GUIDE.read_text("utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0].strip()


def main(write: Annotated[bool, typer.Option("--write", help="Into the guide.")] = False) -> None:
    if (reason := unreachable()) is not None:
        raise BenchError(f"the package index does not answer: {reason}", remedy="try again where it can be reached")
    found = table()
    if write:
        text = GUIDE.read_text("utf-8")
        GUIDE.write_text(text.replace(f"\n{written()}\n", f"\n{found}\n"), "utf-8")
    print(found)


if __name__ == "__main__":
    run(main)
