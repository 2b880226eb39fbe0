"""Is this machine fit to train on, a store fit to keep a run? Each check has a finding and a remedy."""

import os
import platform
import resource
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from data_service.store.base import Store
from data_service.store.errors import StoreError
from data_service.store.open import open_store
from launcher.human import human_bytes

Verdict = Literal["ok", "warning", "failure"]

_GIB = 1 << 30
_PINS = Path(__file__).parent.parent / "infra" / "constraints.txt"
_MATTERS = ("torch", "deepspeed", "ray", "numpy", "tokenizers", "boto3", "pydantic", "safetensors")
_LEAST_FILES, _GOOD_FILES = 1024, 65_536


@dataclass(frozen=True)
class Finding:
    """One check's result; `remedy` is empty when all is well."""

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examine(uris: list[str]) -> Iterator[Finding]:
    """Findings about this machine, then about each store in `uris` (a probe is written and removed)."""
    yield _python()
    yield from _versions()
    yield _cores()
    yield _memory()
    yield _shared_memory()
    yield _disk()
    yield _gpus()
    yield _open_files()
    yield _network()
    yield _clock()
    for uri in uris:
        yield from probe_store(uri)


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")


def _versions() -> Iterator[Finding]:
    """Installed against pinned, where the pins are at hand (a checkout, not a wheel)."""
    pins: dict[str, str] = {}
    if _PINS.is_file():
        pins = dict(line.split("==", 1) for line in _PINS.read_text().splitlines() if "==" in line)
    for name in _MATTERS:
        installed = metadata.version(name)
        pinned = pins.get(name, installed)
        if installed.split("+")[0] == pinned:  # 2.13.0+cpu is a build of 2.13.0
            yield Finding(name, "ok", installed)
        else:
            yield Finding(
                name, "warning", f"{installed}, tested with {pinned}", "install with infra/constraints.txt"
            )


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    verdict: Verdict = "ok" if usable >= 2 else "warning"
    return Finding(
        "cores", verdict, f"{usable} usable of {os.cpu_count()}", "" if usable >= 2 else "2 or more help"
    )


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    found = f"{human_bytes(memory.available)} free of {human_bytes(memory.total)}"
    if memory.available >= 4 * _GIB:
        return Finding("memory", "ok", found)
    return Finding("memory", "warning", found, "training wants 4 GiB free; lower data_service.memory")


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    if free >= _GIB:
        return Finding("/dev/shm", "ok", f"{human_bytes(free)} free")
    remedy = "Ray keeps batches there; in a container: --shm-size=8g (without, Ray falls back to slow disk)"
    return Finding("/dev/shm", "warning", f"{human_bytes(free)} free", remedy)


def _disk() -> Finding:
    folder = os.environ.get("TMPDIR", "/tmp")
    free = shutil.disk_usage(folder).free
    if free >= 5 * _GIB:
        return Finding("temporary disk", "ok", f"{human_bytes(free)} free in {folder}")
    return Finding(
        "temporary disk", "warning", f"{human_bytes(free)} free in {folder}", "set TMPDIR to a larger disk"
    )


def _gpus() -> Finding:
    import torch  # seconds to import, so not before it is its turn

    if not torch.cuda.is_available():
        return Finding("GPUs", "ok", "none: training runs on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("GPUs", "ok", f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft:,} (at most {hard:,})"
    if soft >= _GOOD_FILES:
        return Finding("open files", "ok", found)
    verdict: Verdict = "warning" if soft >= _LEAST_FILES else "failure"
    return Finding("open files", verdict, found, f"raise it to {_GOOD_FILES:,} (ulimit -n): Ray opens many")


def _network() -> Finding:
    """Ranks meet through TCP ports on this host's own name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), 5):
            return Finding("ports", "ok", f"{name} is {address}, connections work")
    except OSError as error:
        remedy = f"make {name} resolve to an address of this machine (/etc/hosts), and allow its ports"
        return Finding("ports", "failure", f"{name}: {error}", remedy)


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
    """What a run does to its store, once each, timed: put, conditional put, get, range, list, delete."""
    try:
        store = open_store(uri, patience_s=10.0)
        started = time.monotonic()
        wrong = _exercise(store, f"maskfleet-doctor-{uuid.uuid4().hex}")
    except StoreError as error:
        yield Finding(f"store {uri}", "failure", error.problem, error.remedy)
        return
    if wrong:
        yield Finding(f"store {uri}", "failure", wrong, "use a store with conditional puts (If-None-Match)")
    else:
        milliseconds = 1e3 * (time.monotonic() - started)
        yield Finding(f"store {uri}", "ok", f"put, get, list, delete work ({milliseconds:.0f} ms in all)")


def _exercise(store: Store, key: str) -> str:
    """What the store gets wrong; empty if nothing. Leaves nothing behind."""
    try:
        if not store.put_if_absent(key, b"first") or store.put_if_absent(key, b"second"):
            return "a conditional put does not protect what exists"
        if store.get(key) != b"first" or store.get_range(key, 1, 3) != b"irs":
            return "what was put is not what is read"
        if [entry.size for entry in store.list(key)] != [5]:
            return "a listing does not show what was just put"
    finally:
        store.delete(key)
    return "" if store.size(key) is None else "a deleted object is still there"
