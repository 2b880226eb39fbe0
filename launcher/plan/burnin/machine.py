"""Describes the machine, and measures its peaks: matrix products by dtype, and memory bandwidth."""

import hashlib
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import psutil
import pynvml
import torch

from encoder_core.trials.trial_process import Line, Report
from launcher.output import human_bytes
from launcher.plan.burnin.check import Bench, Form
from launcher.plan.burnin.record import Machine
from launcher.runtime.capacity.devices import Gpu, gpu_of_device
from launcher.runtime.preflight.collective import source_digest

_PACKAGES = ("maskfleet", "numpy", "pydantic", "triton", "deepspeed", "transformers", "safetensors", "ray")
_PEAK = 0.5  # of the vendor's figure: a GPU that reaches less is throttled, shared, or not what its name says
_BANDWIDTH = 0.6
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WARM, _TIMED = 3, 10


def describe(form: Form | None, recipes: str) -> Machine:
    """Describe this machine; this asks the GPU's driver. `form` None: a GPU where there is one."""
    gpu = torch.cuda.is_available() if form is None else form == "gpu"
    facts = _facts(gpu)
    told = "\n".join(
        [source_digest(), recipes, str(gpu), *(f"{name}={facts[name]}" for name in sorted(facts))]
    )
    return Machine(
        identity=hashlib.sha256(told.encode()).hexdigest()[:16],
        form="gpu" if gpu else "cpu",
        device=torch.cuda.get_device_name(0) if gpu else _processor(),
        gpus=torch.cuda.device_count() if gpu else 0,
        memory=torch.cuda.get_device_properties(0).total_memory if gpu else 0,
        facts=facts,
    )


def _facts(gpu: bool) -> dict[str, str]:
    """Return facts by name. None of them changes while the machine stays the same."""
    found = {
        "Python": platform.python_version(),
        "system": platform.platform(terse=True),
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": human_bytes(psutil.virtual_memory().total),
        "torch": torch.__version__,
        "CUDA that torch was built with": str(torch.version.cuda),
        "sources": source_digest(),
    }
    found |= {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    return found | (_gpu_facts() if gpu else {})


def _gpu_facts() -> dict[str, str]:
    pynvml.nvmlInit()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    found = {"driver": str(driver), "cuDNN": str(cudnn)}
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    found["NCCL"] = ".".join(map(str, nccl))
    for number in range(torch.cuda.device_count()):
        kind = torch.cuda.get_device_properties(number)
        found[f"GPU {number}"] = (
            f"{kind.name}, sm_{kind.major}{kind.minor}, {human_bytes(kind.total_memory)}, "
            f"{kind.multi_processor_count} multiprocessors"
        )
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call. On a GPU, events on its stream measure it, so that the host's speed does
    not count.
    """
    on_cpu = device.type != "cuda"  # where a call may be interpreted, and take seconds
    for _ in range(1 if on_cpu else _WARM):
        function()
    if on_cpu:
        seconds = []
        for _ in range(_WARM):
            began = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)
    edges = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED + 1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    edges[0].record()
    for edge in edges[1:]:
        function()
        edge.record()
    torch.cuda.synchronize(device)
    milliseconds = [a.elapsed_time(b) for a, b in pairwise(edges)]
    return 1e-3 * float(statistics.median(milliseconds))


def device_of(bench: Bench) -> torch.device:
    return torch.device("cuda", 0) if bench.gpu else torch.device("cpu")


def known_gpu() -> Gpu | None:
    """Return the vendor's figures of this machine's first GPU, or None if they are unknown."""
    kind = torch.cuda.get_device_properties(0)
    return gpu_of_device(kind.name, kind.total_memory)


def peaks(bench: Bench) -> None:
    """Compare products of square matrices, and copies within memory, with the vendor's figures."""
    device, report = device_of(bench), bench.report
    known = known_gpu() if bench.gpu else None
    for name, dtype in _DTYPES.items():
        with report.attempt(f"matrix products in {name}"):
            flops = _products(device, dtype)
            report.figure(f"matrix products in {name}", flops / 1e12, "TFLOP/s")
            peak = None if known is None else known.peak_fp32 if name == "fp32" else known.peak
            if peak is not None:
                report.at_least(f"of the vendor's figure for {name}", flops / peak, _PEAK)
    with report.attempt("matrix products in fp32 as TF32"):
        if bench.gpu:
            report.figure(
                "matrix products in fp32 as TF32",
                _products(device, torch.float32, tf32=True) / 1e12,
                "TFLOP/s",
            )
    for what, factor, step in _traffic(device):
        with report.attempt(what):
            rate = factor / seconds_of(step, device)
            report.figure(what, rate / 1e9, "GB/s")
            if known is not None:
                report.at_least("of the vendor's figure", rate / known.bandwidth, _BANDWIDTH)


def _products(device: torch.device, dtype: torch.dtype, *, tf32: bool = False) -> float:
    """Return the FLOP/s of the fastest of several sizes."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return max(
            _square(device, dtype, size) for size in ((4096, 8192) if device.type == "cuda" else (256, 512))
        )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _square(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / seconds_of(lambda: torch.mm(a, b, out=out), device)


def _traffic(device: torch.device) -> list[tuple[str, float, Callable[[], object]]]:
    """Return (what, bytes moved, step to time) for each kind of memory traffic."""
    size = (2 << 30) if device.type == "cuda" else (64 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return [("bandwidth of memory, by copying", 2.0 * size, lambda: target.copy_(source))]


def environment(bench: Bench) -> None:
    """Report what is installed, and check that driver, torch and Triton work together."""
    report = bench.report
    for what, found in describe(bench.request.form, "").facts.items():
        report.figure(what, found)
    device = device_of(bench)
    report.holds("a sum on the device is right", float(torch.arange(1000.0, device=device).sum()) == 499500.0)
    if bench.gpu:
        report.figure("free memory of the GPU", torch.cuda.mem_get_info(0)[0] / 2**30, "GiB")
        report.holds("bf16 is supported", torch.cuda.is_bf16_supported())
        report.holds("torch was built for this GPU", _built_for_it(), ", ".join(torch.cuda.get_arch_list()))


def _built_for_it() -> bool:
    """Return whether torch was built for this GPU.

    Compiled code runs on GPUs of its own generation with the same or a later minor revision, PTX on any later GPU.
    """
    major, minor = torch.cuda.get_device_capability(0)
    for arch in torch.cuda.get_arch_list():
        kind, _, digits = arch.partition("_")
        number = int("".join(filter(str.isdigit, digits)))
        if (kind == "sm" and number // 10 == major and number % 10 <= minor) or (
            kind == "compute" and number <= 10 * major + minor
        ):
            return True
    return False


def serve(request: Report, line: Line) -> None:
    """Report what the machine is, from a process of its own. `form` None: a GPU where there is one."""
    found = describe(request["form"], " ".join(request["recipes"]))
    line.report(machine=found.model_dump(mode="json"))
