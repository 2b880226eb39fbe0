"""Tries the kernels on this machine's GPU: which are correct for a recipe's networks, and how fast they are. Also
decides whether a run's layers are compiled here, and names compiled code by a hash of all that it depends on."""

import hashlib
import json
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pynvml
import torch
from pydantic import Field

from data_service.formats import StrictRecord
from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.kernel_choice import Kernel, Place, Preference
from encoder_core.trials.kernel_trial import Limits, TriedKernel, build_preference, try_kernels
from encoder_core.trials.trial_network import TrialSubject
from launcher.runtime.preflight.collective import installed_versions
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import with_vocab
from launcher.runtime.recipe.tiny import tiny

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ATTENTION_RECIPES = ("bert-base", "modernbert-base", "deberta-v3-base", "xlnet-base")
"""Recipes whose networks together have every form of attention except learned relative keys."""


class KernelTrialRecord(StrictRecord):
    """A `TriedKernel` for JSON. `error` is None if the error was not measured, or is not finite."""

    kernel: Kernel
    dropped: bool
    right: bool
    error: float | None
    bound: float
    seconds: float | None
    failure: str
    place: Place = "attention"

    @classmethod
    def from_trial(cls, tried: TriedKernel) -> "KernelTrialRecord":
        finite = tried.error if tried.error is not None and tried.error < float("inf") else None
        same = {name: getattr(tried, name) for name in cls.model_fields if name not in ("right", "error")}
        return cls(**same, right=tried.is_right, error=finite)


class KernelVerdict(StrictRecord):
    """The result of a trial of kernels on one kind of GPU.

    Attributes:
        time: time of the trial.
        gpu: name of the GPU, and the driver's version.
        plain, dropped: attention kernels to use without and with dropout, the best first.
        elsewhere: kernels to use in other places of the network, the best first.
        tried: results of all kernels.
        ended: why the trial was ended early; empty if it was completed.
    """

    time: str
    gpu: str
    plain: tuple[Kernel, ...]
    dropped: tuple[Kernel, ...]
    tried: tuple[KernelTrialRecord, ...]
    elsewhere: dict[Place, tuple[Kernel, ...]] = Field(default_factory=dict)
    ended: str = ""

    @property
    def preference(self) -> Preference:
        """The kernels to use, by place and dropout, the best first."""
        return Preference(self.plain, self.dropped, self.elsewhere)

    @property
    def rejected_trials(self) -> list[KernelTrialRecord]:
        return [one for one in self.tried if not one.right]


def local_gpu_name() -> str | None:
    """Return the names of this process's GPU and of its driver's version; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    pynvml.nvmlInit()
    try:
        return f"{torch.cuda.get_device_name()}, driver {pynvml.nvmlSystemGetDriverVersion()}"
    finally:
        pynvml.nvmlShutdown()


def trial_subject(recipe: Recipe, config: ModelConfig) -> TrialSubject:
    """Return the subject of a trial: the recipe's networks, with the microbatch of the phase that has the longest rows.
    `config`: configuration of the recipe's first network."""
    networks: tuple[ModelConfig, ...] = (config,)
    if recipe.objective.rtd is not None:
        networks = (config, config.generator)
    length, rows = max((phase.length, recipe.microbatch_rows(phase)) for phase in recipe.phases)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    causal, stable = recipe.objective.clm is not None, recipe.optimizer.stableadamw is not None
    return TrialSubject(networks, _DTYPES[recipe.precision], device, rows, length, causal, stable)


def examine_kernels(
    subject: TrialSubject,
    gpu: str,
    *,
    timed: bool,
    limits: Limits | None = None,
    tick: Callable[[], None] = lambda: None,
) -> KernelVerdict:
    """Try the kernels on `gpu` and return the verdict. The other arguments are passed to `try_kernels`."""
    trial = try_kernels(subject, timed=timed, limits=limits, tick=tick)
    order = build_preference(trial.tried)
    return KernelVerdict(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        gpu=gpu,
        plain=order.plain,
        dropped=order.dropped,
        elsewhere=dict(order.elsewhere),
        tried=tuple(map(KernelTrialRecord.from_trial, trial.tried)),
        ended=trial.ended,
    )


def examine_attention_forms() -> Iterator[tuple[str, KernelVerdict]]:
    """Try the kernels for every form of attention. Yield each tried bundled recipe's name and verdict. Without
    a GPU, the CPU's kernels are tried with small networks and not timed."""
    gpu = local_gpu_name()
    for name in _ATTENTION_RECIPES:
        recipe = load(name) if gpu else tiny(load(name))
        subject = trial_subject(recipe, with_vocab(recipe.model))
        yield name, examine_kernels(subject, gpu or "CPU", timed=gpu is not None)


_CPUINFO = Path("/proc/cpuinfo")
CompileSetting = Literal["auto"] | bool
"""The recipe's `compile`: whether torch compiles layers. `auto`: only on a GPU for which Triton can compile."""


@dataclass(frozen=True)
class CompileChoice:
    """The decision whether to compile layers, and the reason. `told`: whether the operator sees a note about it."""

    compiled: bool
    why: str
    told: bool = True


def choose_compilation(setting: CompileSetting, gpu: str | None, *, unfit: str) -> CompileChoice:
    """Decide whether to compile layers. `gpu`: name; None on a CPU. `unfit`: why Triton cannot compile, or empty."""
    match setting, gpu:
        case False, _:
            return CompileChoice(False, "the recipe says so", told=False)
        case "auto", None:
            return CompileChoice(False, "on a CPU only where the recipe asks for it (compile: true)", told=False)
        case True, _:
            return CompileChoice(True, "the recipe says so")
        case _ if unfit:
            return CompileChoice(False, unfit)
        case _:
            return CompileChoice(True, "a GPU, and Triton")


def is_triton_installed() -> bool:
    return find_spec("triton") is not None


def compiled_code_name(subject: TrialSubject, zero: int) -> str:
    """Return a hash of all that compiled code depends on: versions, kind of machine, networks, ZeRO stage (`zero`)."""
    what = {
        "machine": local_gpu_name() or _cpu_description(),
        "threads": torch.get_num_threads(),
        "installed": installed_versions() | _compiler_versions(),
        "networks": [network.model_dump(mode="json") for network in subject.networks],
        "rows": [str(subject.dtype), subject.rows, subject.length],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "zero": zero,
    }
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=10).hexdigest()


@cache
def _compiler_versions() -> dict[str, str]:
    """Return the versions of the C++ compiler ("" if there is none) and of Triton, if it is installed."""
    found = {"C++": _cxx_compiler_version()}
    if is_triton_installed():
        import triton

        found["Triton"] = triton.__version__
    return found


def _cxx_compiler_version() -> str:
    path = shutil.which("g++")
    if path is None:
        return ""
    version_output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return (version_output.stdout.splitlines() or [""])[0]


def _cpu_description() -> str:
    """Return the processor's kind and instruction sets; compiled code may use all of these."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.is_file() else []
    fields = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return " ".join([platform.machine(), fields.get("model name", ""), fields.get("flags", "")])
