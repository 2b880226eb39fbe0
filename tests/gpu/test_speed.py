"""Layers compiled by torch, and how fast recipes train: tokens a second and MFU, with dropout and without."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from encoder_core.layers.pieces import Pieces
from encoder_core.layers.torch_internals import discard_graphs
from encoder_core.trials.compile_trial import try_compilation
from encoder_core.trials.trial_network import TrialSubject
from launcher.runtime.capacity.workload import model_cost, shape_of_full_rows, targets_per_row_in_phase
from launcher.runtime.preflight.kernels import is_triton_installed, trial_subject
from launcher.runtime.rank.journal import peak_flops
from launcher.runtime.recipe.phases import recipe_in_phase
from tests.gpu.machine import DEVICE, GPU, RECIPES, Figure
from tests.gpu.networks import Steps, engine_of, recipe_of
from tests.gpu.timing import MICROBATCH_TOKENS, choose_kernels, compiled_pieces, step_seconds

_MICROBATCHES = 2  # of a step
_MIN_MFU = {"bert-large": 0.25}  # of compiled layers on a GPU, below which something is wrong
_DEFAULT_CASES = (
    ("bert-large", 128),
    ("roberta-base", 512),
    ("bert-large", 512),
    ("deberta-v3-base", 512),
    ("modernbert-base", 1024),
)
CASES = tuple((name, 0) for name in RECIPES) if "MASKFLEET_GPU_RECIPES" in os.environ else _DEFAULT_CASES
needs_triton = pytest.mark.skipif(GPU and not is_triton_installed(), reason="Triton is not installed")


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of its own for what torch and Triton compile, empty at first."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # helpers' processes would outlive a killed test
        yield folder


@needs_triton
@pytest.mark.parametrize("turn", ["cold", "cached"])
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_layers_have_pythons_gradients(name: str, turn: str, caches: Path, figure: Figure) -> None:
    """Compiled without caches, and then with those of the cold turn, in seconds instead of minutes."""
    discard_graphs()
    recipe = recipe_of(name)
    subject = trial_subject(recipe, recipe.model)
    few = TrialSubject(subject.networks, subject.dtype, DEVICE, min(subject.rows, 16), subject.length)
    found = try_compilation(few, Pieces())
    assert not found.failure
    figure(f"{turn}, {found.graphs} graphs", found.seconds, "s")
    assert (found.error or 0.0) <= found.bound


@pytest.mark.usefixtures("group", "caches")
@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_triton)], ids=["plain", "compiled"])
@pytest.mark.parametrize(("name", "length"), CASES)
def test_speed_of_a_step(name: str, length: int, compiled: bool, dropout: float, figure: Figure) -> None:
    recipe = recipe_of(name, dropout=dropout)
    length = length if GPU and length else recipe.phases[0].length
    rows = max(1, MICROBATCH_TOKENS // length)
    choose_kernels(recipe)
    pieces = compiled_pieces(recipe, rows, length) if compiled else None
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine = engine_of(recipe, 1, "bf16", pieces)
    seconds = step_seconds(engine, Steps(recipe, _MICROBATCHES, rows, length, even=True))
    figure("speed", _MICROBATCHES * rows * length / seconds, "tokens/s")
    targets = targets_per_row_in_phase(recipe, recipe.phases[0]) * length // recipe.phases[0].length
    shape = shape_of_full_rows(recipe_in_phase(recipe, recipe.phases[0]), rows, length, targets)
    speed = peak_flops(DEVICE, "bf16")
    if speed is not None:
        mfu = _MICROBATCHES * model_cost(recipe, shape).model / seconds / speed
        figure("MFU", mfu, "")
        assert not (GPU and compiled) or mfu >= _MIN_MFU.get(recipe.name, 0.0)
    if GPU:
        figure("peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
