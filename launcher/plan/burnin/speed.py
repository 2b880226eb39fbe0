"""Layers compiled by torch, and how fast recipes train: tokens a second and MFU, with and without compiling and
dropout.
"""

import os
import shutil
import statistics
import time
from pathlib import Path

import torch

from encoder_core.layers.kernel_choice import prefer
from encoder_core.layers.pieces import Pieces
from encoder_core.layers.torch_internals import forget_graphs
from encoder_core.train.engine import Engine
from encoder_core.train.step import RankBatch, accumulate
from encoder_core.trials.compile_trial import TriedCompilation, try_compilation
from encoder_core.trials.trial_network import Subject
from launcher.plan.burnin.check import Bench
from launcher.plan.burnin.machine import device_of
from launcher.plan.burnin.networks import Steps, engine_of, joined, recipe_of
from launcher.plan.burnin.report import CannotRun
from launcher.plan.estimate.utilisation import step_share
from launcher.runtime.capacity.devices import gpu_of_device
from launcher.runtime.capacity.workload import Shape, full_rows, microbatch_flops, phase_targets
from launcher.runtime.preflight.kernels import examine_kernels, gpu_here, subject_of, triton_here
from launcher.runtime.rank.journal import peak
from launcher.runtime.recipe.phases import during
from launcher.runtime.recipe.schema import Recipe

TOKENS = {"gpu": 32_768, "cpu": 512}  # of a microbatch
_MICROBATCHES = 2  # of a step
_WARM, _TIMED_S, _FEWEST = 3, 6.0, 3
_LEAST = {"bert-large": 0.25}  # MFU of compiled layers on a GPU below which something is wrong
_RATES = (0.1, 0.0)


def compiled(bench: Bench, turn: str) -> None:
    """Compile layers of each recipe and compare them with Python's.

    `turn` "cold" compiles without caches; "cached" uses those of the cold turn, in seconds instead of minutes.
    """
    report = bench.report
    if bench.gpu and not triton_here():
        raise CannotRun("Triton is not installed")
    folder = _caches()
    if turn == "cached" and not folder.is_dir():
        raise CannotRun("there is no compiled code yet: the check compiled-cold must run first")
    if turn == "cold":
        shutil.rmtree(folder, ignore_errors=True)
    whole = 0.0
    for name in bench.request.recipes:
        with report.attempt(name):
            found = _compiled(bench, name)
            whole += found.seconds
            report.figure(f"{name}: {turn}", found.seconds, "s")
            report.figure(f"{name}: graphs", float(found.graphs))
            report.at_most(f"{name}: error of gradients", found.error or 0.0, found.bound)
    report.figure(f"all of it, {turn}", whole, "s")


def _caches() -> Path:
    """Put what torch and Triton compile from here on into a folder of its own, apart from other checks; return the
    folder.
    """
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).with_name("layers")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = (
        "1"  # helpers' processes would outlive a check that is killed
    )
    return folder


def _compiled(bench: Bench, name: str) -> TriedCompilation:
    forget_graphs()
    recipe = recipe_of(bench, name)
    subject = subject_of(recipe, recipe.model)
    few = Subject(subject.networks, subject.dtype, device_of(bench), min(subject.rows, 16), subject.length)
    found = try_compilation(few, Pieces())
    if found.failure:
        raise RuntimeError(found.failure)
    return found


def trained(bench: Bench, name: str, length: str) -> None:
    """Measure steps of a recipe on full rows of this length."""
    chosen = bench.request.recipes[0] if name == "own" else name
    base = recipe_of(bench, chosen)
    rows = int(length) if bench.gpu and length else base.phases[0].length
    every = [(rate, compiled) for compiled in (False, True) for rate in _RATES]
    _caches()
    choose_kernels(bench, recipe_of(bench, chosen))
    with joined(device_of(bench), bench.folder):
        for rate, is_compiled in every:
            what = f"{base.name} at {rows}, dropout {rate:g}{', compiled' if is_compiled else ''}"
            with bench.report.attempt(what):
                _measure(bench, recipe_of(bench, chosen, dropout=rate), rows, what, is_compiled)
            if bench.gpu:
                torch.cuda.empty_cache()


def choose_kernels(bench: Bench, recipe: Recipe) -> None:
    """On a GPU, compute attention with the kernels that a run's own trial prefers."""
    gpu = gpu_here() if bench.gpu else None
    if gpu is None:
        return
    subject = subject_of(recipe, recipe.model)
    verdict = examine_kernels(subject, gpu, {}, lambda kernel: None, timed=True)
    prefer(verdict.preference)
    bench.report.figure("attention without dropout", ", ".join(verdict.plain))
    bench.report.figure("attention with dropout", ", ".join(verdict.dropped))


def _measure(bench: Bench, recipe: Recipe, length: int, what: str, is_compiled: bool) -> None:
    device, form = device_of(bench), bench.request.form
    rows = max(1, TOKENS[form] // length)
    pieces = pieces_of(bench, recipe, rows, length) if is_compiled else None
    if is_compiled and pieces is None:
        bench.report.figure(what, "not compiled: Triton is not installed")
        return
    engine = engine_of(recipe, 1, "bf16", pieces)
    seconds = step_seconds(engine, Steps(recipe, _MICROBATCHES, rows, length, even=True), bench.gpu)
    tokens = _MICROBATCHES * rows * length
    targets = phase_targets(recipe, recipe.phases[0]) * length // recipe.phases[0].length
    shape = full_rows(during(recipe, recipe.phases[0]), rows, length, targets)
    flops = _MICROBATCHES * microbatch_flops(recipe, shape).model
    bench.report.figure(f"{what}: tokens a second", tokens / seconds, "tokens/s")
    speed = peak(device, "bf16")
    if speed is not None:
        mfu = flops / seconds / speed
        if bench.gpu and is_compiled and recipe.name in _LEAST:
            bench.report.at_least(f"{what}: MFU", mfu, _LEAST[recipe.name])
        else:
            bench.report.figure(f"{what}: MFU", mfu)
        _expected(bench, recipe, shape, what)
    if bench.gpu:
        bench.report.figure(f"{what}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        torch.cuda.reset_peak_memory_stats()


def _expected(bench: Bench, recipe: Recipe, shape: Shape, what: str) -> None:
    """Report what the estimate says of the same steps."""
    if bench.gpu:
        kind = torch.cuda.get_device_properties(0)
        gpu = gpu_of_device(kind.name, kind.total_memory)
        if gpu is not None:
            bench.report.figure(
                f"{what}: MFU that is estimated", step_share(recipe, shape, gpu, _MICROBATCHES)
            )


def pieces_of(bench: Bench, recipe: Recipe, rows: int, length: int) -> Pieces | None:
    """Compile layers as a run does: before training, for rows of its shape. None without Triton on a GPU.

    Raises:
        RuntimeError: compiling failed.
    """
    if bench.gpu and not triton_here():
        return None
    forget_graphs()
    subject = subject_of(recipe, recipe.model)
    pieces = Pieces()
    found = try_compilation(
        Subject(subject.networks, torch.bfloat16, device_of(bench), rows, length), pieces, compared=False
    )
    if found.failure:
        raise RuntimeError(found.failure)
    return pieces


def step_seconds(engine: Engine, steps: Steps, gpu: bool) -> float:
    """Return the median seconds of a step whose rows are already on the device."""
    work = [steps.work(engine, step) for step in range(2)]
    counts = steps.counts(engine, work[0])
    found: list[float] = []
    end = float("inf")
    for number in range(200):
        if number == _WARM:
            end = time.perf_counter() + (_TIMED_S if gpu else 1.0)
        began = time.perf_counter()
        take_step(engine, work[number % 2], counts, number)
        if gpu:
            torch.cuda.synchronize()
        if number >= _WARM:
            found.append(time.perf_counter() - began)
        if len(found) >= _FEWEST and time.perf_counter() > end:
            break
    return statistics.median(found)


def take_step(engine: Engine, work: RankBatch, counts: dict[str, float], number: int) -> None:
    memories: dict[int, tuple[torch.Tensor, ...]] = {}
    for group in engine.update_groups:
        accumulate(engine, work, counts, 1, memories, group)
        engine.update(1e-5, number + 1, group)
