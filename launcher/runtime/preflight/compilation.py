"""Whether a run's layers are compiled on this machine, and what compiled code depends on."""

import hashlib
import json
import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from encoder_core.trials.trial_network import Subject
from launcher.runtime.preflight.collective import installed
from launcher.runtime.preflight.kernels import gpu_here

_CPUINFO = Path("/proc/cpuinfo")
Compile = Literal["auto"] | bool
"""Whether torch compiles layers; `auto`: on GPUs, where Triton is installed."""


@dataclass(frozen=True)
class Choice:
    """Whether to compile, and why. `told`: whether a person may wonder."""

    compiled: bool
    why: str
    told: bool = True


def choose(asked: Compile, gpu: str | None, *, triton: bool) -> Choice:
    """`gpu`: None on a CPU. `triton`: whether it is installed; on a GPU nothing compiles without."""
    match asked, gpu:
        case False, _:
            return Choice(False, "the recipe says so", told=False)
        case "auto", None:
            return Choice(False, "on a CPU only where the recipe asks for it (compile: true)", told=False)
        case True, _:
            return Choice(True, "the recipe says so")
        case _ if not triton:
            return Choice(False, "Triton is not installed")
        case _:
            return Choice(True, "a GPU, and Triton")


def triton_here() -> bool:
    return find_spec("triton") is not None


def name_of(subject: Subject, zero: int) -> str:
    """Of all that compiled code depends on: versions, the machine's kind, and what is compiled."""
    what = {
        "machine": gpu_here() or _cpu(),
        "threads": torch.get_num_threads(),
        "installed": installed() | _compilers(),
        "networks": [network.model_dump(mode="json") for network in subject.networks],
        "rows": [str(subject.dtype), subject.rows, subject.length],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "zero": zero,
    }
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=10).hexdigest()


@cache
def _compilers() -> dict[str, str]:
    """Triton's version, and what C++ is compiled with; those that are there."""
    found = {"C++": _cxx()}
    if triton_here():
        import triton

        found["Triton"] = triton.__version__
    return found


def _cxx() -> str:
    path = shutil.which("g++")
    if path is None:
        return ""
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return (told.stdout.splitlines() or [""])[0]


def _cpu() -> str:
    """The processor's kind: what is compiled for it uses all its instructions."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.is_file() else []
    told = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return " ".join([platform.machine(), told.get("model name", ""), told.get("flags", "")])
