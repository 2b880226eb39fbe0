"""`maskfleet doctor`: checks whether this machine can train, and whether a store can hold a run. Each check has a
finding and a remedy.

A start waits for a rank's imports, on every node. Python looks for a module in thousands of small files, and torch is
hundreds of megabytes of shared libraries. From a warm file cache the imports take seconds; from a cold disk, or from a
network file system that a thousand ranks read at once, minutes. A fresh process measures them, because this process has
already imported some of the modules.
"""

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from checkpoints.host_memory import available_memory
from data_service.printable import mask_secrets
from data_service.store.errors import StoreError
from data_service.store.open import open_store
from launcher.output import human_bytes
from launcher.progress import work
from launcher.runtime.preflight import findings
from launcher.runtime.preflight.findings import Finding, Verdict
from launcher.runtime.preflight.measure import (
    gpu_states,
    open_files_finding,
    raise_open_files,
    shared_memory_finding,
    store_finding,
    temporary_disk_finding,
)
from launcher.runtime.preflight.network import examine_network, local_address
from launcher.runtime.preflight.releases import triton_problem, untested_torch_warning

_PINS = Path(__file__).parents[3] / "infra" / "constraints.txt"  # tested versions; missing in a wheel
_INSTALL_REMEDY = "install with infra/constraints.txt"
_PINNED_PACKAGES = ("torch", "deepspeed", "ray", "numpy", "tokenizers", "boto3", "pydantic", "safetensors")


def examine_machine(uris: list[str], *, imports: bool = False) -> Iterator[Finding]:
    """Yield findings about this machine, then about each store in `uris`. A trial object is written to each store and
    deleted. `imports`: whether to time the imports of a rank, which takes as long as a start."""
    yield _check_python()
    yield from _check_versions()
    yield _check_cores()
    yield findings.judge_memory(*available_memory())
    yield shared_memory_finding()
    yield temporary_disk_finding()
    if imports:
        with work("importing a rank's modules"):
            yield examine_imports()
    yield from _check_gpus()
    raise_open_files()
    yield open_files_finding()
    yield examine_network(local_address())
    yield _check_clock()
    for uri in uris:
        yield from probe_store(uri)


def _check_python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")


def _check_versions() -> Iterator[Finding]:
    """Compare installed versions with the pinned ones, and torch with the tested ones. Without infra/constraints.txt
    (in a wheel), all versions of other packages are accepted."""
    pins: dict[str, str] = {}
    if _PINS.is_file():
        pins = dict(line.split("==", 1) for line in _PINS.read_text().splitlines() if "==" in line)
    for name in _PINNED_PACKAGES:
        installed = metadata.version(name)
        pinned = pins.get(name, installed)
        if name == "torch":
            line = untested_torch_warning()
            yield Finding(name, "warning" if line else "ok", line or installed, line and _INSTALL_REMEDY)
        elif installed.split("+")[0] == pinned:  # the version without a build suffix such as +cu128
            yield Finding(name, "ok", installed)
        else:
            yield Finding(name, "warning", f"{installed}, tested with {pinned}", _INSTALL_REMEDY)
    if _has_cuda() and (line := triton_problem()):
        yield Finding("triton", "warning", line, _INSTALL_REMEDY)


def _check_cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    verdict: Verdict = "ok" if usable >= 2 else "warning"
    return Finding(
        "cores", verdict, f"{usable} usable of {os.cpu_count()}", "" if usable >= 2 else "use 2 cores or more"
    )


def _check_gpus() -> Iterator[Finding]:
    if not _has_cuda():
        yield Finding("GPUs", "ok", "none: training runs on the CPU")
        return
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Finding("GPUs", "ok", f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}")
    for state in gpu_states():
        yield from findings.judge_gpu(state)


def _has_cuda() -> bool:
    """Return whether torch finds a GPU. torch takes seconds to import, so it is not imported without CUDA's driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


def _check_clock() -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    timedatectl = shutil.which("timedatectl")
    if timedatectl is None:
        return Finding("clock", "ok", f"{now} (without timedatectl: synchronisation unknown)")
    command = [timedatectl, "show", "--property=NTPSynchronized", "--value"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    if answer == "no":
        return Finding("clock", "warning", f"{now}, not synchronised", "start an NTP client: S3 refuses skewed clocks")
    return Finding("clock", "ok", now + (", synchronised" if answer == "yes" else ""))


def probe_store(uri: str) -> Iterator[Finding]:
    """Try each operation of a run on the store once, timed: put, conditional put, get, range, list, delete."""
    try:
        store = open_store(uri, patience_s=10.0)
        yield store_finding(f"store {uri}", store, f"maskfleet-doctor-{uuid.uuid4().hex}")
    except StoreError as error:
        yield Finding(f"store {mask_secrets(uri)}", "failure", error.problem, error.remedy)


IMPORTED_MODULES = {
    "torch": "torch",
    "DeepSpeed": "encoder_core.train.engine",
    "Ray": "ray",
    "the rest": "launcher.runtime.cluster.worker",
}
"""The imports of a rank, in this order: name for people, and the module whose import loads the library."""
SLOW_IMPORTS_S = 20.0
"""Seconds of imports that are worth a remedy: from a warm cache they take about 4."""
NETWORK_FILE_SYSTEMS = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "fuse",
    "9p",
    "afs",
    "glusterfs",
    "wekafs",
)
"""Beginnings of the names of file systems whose files lie on other machines."""
_IMPORTS_TIMEOUT_S = 600.0  # seconds until `measure_imports` gives up
_MAX_MODULES_WITHOUT_BYTECODE = 50  # modules that may lack bytecode, such as those of a read-only checkout
_SLOW_IMPORTS_REMEDY = (
    "copy the environment to a local disk of each node, as one file (a container image, or a tar that the job unpacks "
    "into /tmp): many small files are slow there"
)

# The program of `measure_imports`: imports modules, and prints the fields of `ImportTimes` as JSON.
_IMPORTS_PROGRAM = """
import importlib, json, os, sys, time
opened = set()
def hook(event, args):
    if event == "open" and isinstance(args[0], str): opened.add(args[0])
sys.addaudithook(hook)
def disk():
    try: return int(dict(line.split(": ") for line in open("/proc/self/io"))["read_bytes"])
    except OSError: return 0
parts, before = {}, disk()
for name, module in json.loads(sys.argv[1]).items():
    began = time.monotonic()
    importlib.import_module(module)
    parts[name] = time.monotonic() - began
mapped = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.count("/")}
files = {os.path.realpath(path) for path in opened | mapped if os.path.isfile(path) and not path.startswith("/proc/")}
read, size = disk() - before, sum(map(os.path.getsize, files))
cached = [getattr(module, "__cached__", None) for module in list(sys.modules.values())]
uncompiled = sum(isinstance(path, str) and not os.path.exists(path) for path in cached)
print(json.dumps({"seconds": parts, "files": len(files), "size": size, "read": read, "uncompiled": uncompiled}))
"""


@dataclass(frozen=True)
class ImportTimes:
    """The imports of a rank in a fresh process.

    Attributes:
        seconds: seconds of each library, by name, without what earlier libraries have imported.
        files: number of files that were opened or mapped.
        size: bytes of these files. Only parts of shared libraries are read.
        read: bytes that came from a disk and not from memory; a network file system may count none.
        uncompiled: number of modules without bytecode, which Python compiles at every start.
    """

    seconds: dict[str, float]
    files: int
    size: int
    read: int
    uncompiled: int

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def measure_imports(libraries: Mapping[str, str]) -> ImportTimes:
    """Import modules in a fresh process, one after the other. `libraries`: module to import, by the library's name.

    Raises subprocess.SubprocessError if an import fails or they take ten minutes.
    """
    command = [sys.executable, "-c", _IMPORTS_PROGRAM, json.dumps(libraries)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_IMPORTS_TIMEOUT_S)
    return ImportTimes(**json.loads(done.stdout.splitlines()[-1]))


def examine_imports(libraries: Mapping[str, str] = IMPORTED_MODULES) -> Finding:
    """Return the finding on the imports of a rank: their time, files, bytes and file system."""
    try:
        found = measure_imports(libraries)
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        return Finding("imports", "failure", f"a rank's imports fail: {''.join(last)}", "install Maskfleet again")
    except subprocess.TimeoutExpired:
        return Finding("imports", "failure", f"not done after {_IMPORTS_TIMEOUT_S:.0f} s", _SLOW_IMPORTS_REMEDY)
    return judge_imports(found, file_system_kind(Path(sys.prefix)))


def judge_imports(found: ImportTimes, system: str) -> Finding:
    """Judge the imports of a rank from a file system of the kind `system`."""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.seconds.items())
    text = (
        f"{found.total_s:.1f} s ({parts}): {found.files:,} files of {human_bytes(found.size)} on {system}, "
        f"{human_bytes(found.read)} from disk"
    )
    if found.uncompiled > _MAX_MODULES_WITHOUT_BYTECODE:
        text += f"; {found.uncompiled:,} modules have no bytecode"
        return Finding("imports", "warning", text, f"compile them once: python -m compileall {sys.prefix}")
    if found.total_s > SLOW_IMPORTS_S:
        return Finding("imports", "warning", text, _SLOW_IMPORTS_REMEDY)
    return Finding("imports", "ok", text)


def file_system_kind(path: Path) -> str:
    """Return the kind of file system on which `path` lies, such as ext4, overlay or nfs4."""
    real, best, kind = os.path.realpath(path), "", "a file system of unknown kind"
    for line in Path("/proc/self/mountinfo").read_text("utf-8").splitlines():
        before, _, after = line.partition(" - ")
        place = before.split()[4].encode().decode("unicode_escape")  # /proc writes a space as \\040
        inside = place == "/" or real == place or real.startswith(f"{place}/")
        if inside and len(place) >= len(best):  # a later mount hides an earlier one
            best, kind = place, after.split()[0]
    return f"{kind} (on the network)" if kind.startswith(NETWORK_FILE_SYSTEMS) else kind
