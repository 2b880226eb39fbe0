"""`maskfleet doctor`: checks whether this machine can train, and whether a store can hold a run. Each check has a
finding and a remedy."""

import ctypes
import os
import platform
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from checkpoints.host_memory import available_memory
from data_service.printable import mask_secrets
from data_service.store.errors import StoreError
from data_service.store.open import open_store
from launcher.progress import work
from launcher.runtime.preflight import findings
from launcher.runtime.preflight.findings import Finding, Verdict
from launcher.runtime.preflight.libraries import examine_imports
from launcher.runtime.preflight.measure import (
    gpu_states,
    open_files,
    raise_open_files,
    shared_memory,
    store_finding,
    temporary_disk,
)
from launcher.runtime.preflight.network import examine_network, local_address
from launcher.runtime.preflight.releases import unfit_triton, untested_torch

_PINS = Path(__file__).parents[3] / "infra" / "constraints.txt"
_INSTALL = "install with infra/constraints.txt"
_PINNED_PACKAGES = ("torch", "deepspeed", "ray", "numpy", "tokenizers", "boto3", "pydantic", "safetensors")


def examine(uris: list[str], *, imports: bool = False) -> Iterator[Finding]:
    """Yield findings about this machine, then about each store in `uris`. A trial object is written to each store and
    deleted. `imports`: whether to measure what a rank imports, which takes as long as a start."""
    yield _python()
    yield from _versions()
    yield _cores()
    yield findings.memory(*available_memory())
    yield shared_memory()
    yield temporary_disk()
    if imports:
        with work("importing what a rank imports"):
            yield examine_imports()
    yield from _gpus()
    raise_open_files()
    yield open_files()
    yield examine_network(local_address())
    yield _clock()
    for uri in uris:
        yield from probe_store(uri)


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")


def _versions() -> Iterator[Finding]:
    """Compare installed versions with the pinned ones, torch with all that were tested. Without the file of pins (in a
    wheel), all other versions are accepted."""
    pins: dict[str, str] = {}
    if _PINS.is_file():
        pins = dict(line.split("==", 1) for line in _PINS.read_text().splitlines() if "==" in line)
    for name in _PINNED_PACKAGES:
        installed = metadata.version(name)
        pinned = pins.get(name, installed)
        if name == "torch":
            line = untested_torch()
            yield Finding(name, "warning" if line else "ok", line or installed, line and _INSTALL)
        elif installed.split("+")[0] == pinned:  # without the build's suffix
            yield Finding(name, "ok", installed)
        else:
            yield Finding(name, "warning", f"{installed}, tested with {pinned}", _INSTALL)
    if _has_cuda() and (line := unfit_triton()):
        yield Finding("triton", "warning", line, _INSTALL)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    verdict: Verdict = "ok" if usable >= 2 else "warning"
    return Finding(
        "cores", verdict, f"{usable} usable of {os.cpu_count()}", "" if usable >= 2 else "use 2 cores or more"
    )


def _gpus() -> Iterator[Finding]:
    if not _has_cuda():
        yield Finding("GPUs", "ok", "none: training runs on the CPU")
        return
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Finding("GPUs", "ok", f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}")
    for state in gpu_states():
        yield from findings.gpu(state)


def _has_cuda() -> bool:
    """Return whether torch finds a GPU. It is seconds to import, so it is not asked where CUDA's driver is missing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


def _clock() -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    timedatectl = shutil.which("timedatectl")
    if timedatectl is None:
        return Finding("clock", "ok", f"{now} (nothing here tells whether it is synchronised)")
    command = [timedatectl, "show", "--property=NTPSynchronized", "--value"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    if answer == "no":
        return Finding(
            "clock", "warning", f"{now}, not synchronised", "start an NTP client: S3 refuses skewed clocks"
        )
    return Finding("clock", "ok", now + (", synchronised" if answer == "yes" else ""))


def probe_store(uri: str) -> Iterator[Finding]:
    """Try each operation of a run on the store once, timed: put, conditional put, get, range, list, delete."""
    try:
        store = open_store(uri, patience_s=10.0)
        yield store_finding(f"store {uri}", store, f"maskfleet-doctor-{uuid.uuid4().hex}")
    except StoreError as error:
        yield Finding(f"store {mask_secrets(uri)}", "failure", error.problem, error.remedy)
