"""Where the tests of this folder run: on the first GPU at full size, or small on the CPU, and what times them."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import torch

from launcher.runtime.capacity.devices import Gpu, match_gpu_by_device_name

ROOT = Path(__file__).parents[2]
SMALL = os.environ.get("MASKFLEET_GPU_TESTS") == "small"
"""Whether the tests run on the CPU: short rows, kernels under Triton's interpreter, gloo in place of NCCL, small
networks."""
GPU = not SMALL and torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
_DEFAULT_RECIPES = "roberta-base,bert-large,deberta-v3-base,modernbert-base"
RECIPES = tuple(os.environ.get("MASKFLEET_GPU_RECIPES", _DEFAULT_RECIPES).split(","))
"""Bundled names or files of the recipes whose networks are trained, measured and tried."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16} | ({"bf16": torch.bfloat16} if GPU else {})
"""By name. The interpreter does not round to bf16."""
MAX_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""Relative to the whole tensor: what rounding inputs, products and outcomes gives."""
MAX_BIAS = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 1e-5}
"""How far off all numbers of a tensor may be together. Rounding has no direction, so a kernel that is 1 % off is found
in bf16, too."""
_WARM_CALLS, _TIMED_CALLS, _CPU_CALLS = 3, 10, 3

Figure = Callable[[str, float, str], None]
"""The fixture `figure`: puts a name, a number and its unit into pytest's report."""


def known_gpu() -> Gpu | None:
    """Return the vendor's figures of this machine's first GPU; None if they are unknown, or there is no GPU."""
    if not GPU:
        return None
    kind = torch.cuda.get_device_properties(0)
    return match_gpu_by_device_name(kind.name, kind.total_memory)


def seconds_of(function: Callable[[], object], device: torch.device = DEVICE) -> float:
    """Return the median seconds of a call. On a GPU, events on its stream measure it, so that the host's speed does
    not count."""
    if device.type != "cuda":  # a call may be interpreted, and take seconds
        function()
        return statistics.median(_elapsed(function) for _ in range(_CPU_CALLS))
    for _ in range(_WARM_CALLS):
        function()
    edges = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED_CALLS + 1)]
    torch.cuda.synchronize(device)
    edges[0].record()
    for edge in edges[1:]:
        function()
        edge.record()
    torch.cuda.synchronize(device)
    return 1e-3 * float(statistics.median(a.elapsed_time(b) for a, b in pairwise(edges)))


def _elapsed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def start(
    module: str, request: str, log: Path, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a module of this folder as a process of its own, with one argument; `log` takes what it prints."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"tests.gpu.{module}", request],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(processes: list["subprocess.Popen[bytes]"], log: Path, seconds: float) -> None:
    """Wait until all processes have ended well. Raises AssertionError with the end of `log`."""
    deadline = time.monotonic() + seconds
    try:
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
        assert not any(codes), f"codes {codes}: {log.read_text('utf-8', errors='replace')[-2000:]}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
