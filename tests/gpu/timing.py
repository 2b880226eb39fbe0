"""Steps of training that are timed: layers compiled or not, kernels as a run chooses them."""

import statistics
import time

import torch

from encoder_core.layers.kernel_choice import set_preference
from encoder_core.layers.pieces import Pieces
from encoder_core.layers.torch_internals import discard_graphs
from encoder_core.train.engine import Engine
from encoder_core.train.step import RankBatch, accumulate_gradients
from encoder_core.trials.compile_trial import try_compilation
from encoder_core.trials.trial_network import TrialSubject
from launcher.runtime.preflight.kernels import examine_kernels, local_gpu_name, trial_subject
from launcher.runtime.recipe.schema import Recipe
from tests.gpu.machine import DEVICE, GPU
from tests.gpu.networks import Steps

MICROBATCH_TOKENS = 32_768 if GPU else 512
_WARM_STEPS, _MIN_STEPS, _MAX_STEPS = 3, 3, 200
_TIMED_S = 6.0 if GPU else 1.0


def choose_kernels(recipe: Recipe) -> None:
    """On a GPU, compute attention with the kernels that a run's own trial prefers."""
    gpu = local_gpu_name() if GPU else None
    if gpu is not None:
        subject = trial_subject(recipe, recipe.model)
        set_preference(examine_kernels(subject, gpu, timed=True).preference)


def compiled_pieces(recipe: Recipe, rows: int, length: int) -> Pieces:
    """Compile layers as a run does: before training, for rows of its shape. Raises RuntimeError: it failed."""
    discard_graphs()
    pieces, networks = Pieces(), trial_subject(recipe, recipe.model).networks
    subject = TrialSubject(networks, torch.bfloat16, DEVICE, rows, length)
    found = try_compilation(subject, pieces, compared=False)
    if found.failure:
        raise RuntimeError(found.failure)
    return pieces


def step_seconds(engine: Engine, steps: Steps) -> float:
    """Return the median seconds of a step whose rows are already on the device."""
    work = [steps.work(engine, step) for step in range(2)]
    counts = steps.counts(engine, work[0])
    found: list[float] = []
    end = float("inf")
    for number in range(_MAX_STEPS):
        if number == _WARM_STEPS:
            end = time.perf_counter() + _TIMED_S
        began = time.perf_counter()
        take_step(engine, work[number % 2], counts, number)
        if GPU:
            torch.cuda.synchronize()
        if number >= _WARM_STEPS:
            found.append(time.perf_counter() - began)
        if len(found) >= _MIN_STEPS and time.perf_counter() > end:
            break
    return statistics.median(found)


def take_step(engine: Engine, work: RankBatch, counts: dict[str, float], number: int) -> None:
    memories: dict[int, tuple[torch.Tensor, ...]] = {}
    for group in engine.update_groups:
        accumulate_gradients(engine, work, counts, 1, memories, group)
        engine.update(1e-5, number + 1, group)
