"""Memory: the estimate against the peak, and what happens when memory runs out."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from encoder_core.train.engine import Engine
from encoder_core.train.rehearsal import Rehearsal, is_out_of_memory
from encoder_core.train.zero_memory import total_bytes
from launcher.runtime.capacity.devices import usable_gpu_bytes
from launcher.runtime.capacity.memory_fit import RankMemory, rows_that_fit
from tests.gpu.machine import GPU, RECIPES, Figure
from tests.gpu.networks import Steps, engine_of, losses, recipe_of

_ABOVE, _BELOW = 1.15, 0.5  # of the estimate may the peak be
_WORKSPACE_BYTES = 0.3 * 2**30  # that kernels and the allocator's blocks take beside
_MAX_APART = 1e-3 if GPU else 0.0  # sums on a GPU have no order of their own
_MAX_ROWS = 16  # of a microbatch
_LEFT_BYTES = 2 << 30
_STATUS, _HIGH_WATER = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text("utf-8").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def _release() -> None:
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", RECIPES)
def test_the_peak_of_two_steps_is_what_was_estimated(name: str, figure: Figure) -> None:
    """Microbatches have as many rows as the estimate says fit, at most 16."""
    _release()
    recipe = recipe_of(name)
    phase = recipe.phases[-1]
    bill = RankMemory.from_recipe(recipe, 1, "cuda" if GPU else "cpu")
    room = usable_gpu_bytes(torch.cuda.get_device_properties(0).total_memory) if GPU else 4 << 30
    rows = min(_MAX_ROWS, rows_that_fit(bill, room)[-1])
    two = phase.model_copy(update={"batch": phase.batch.model_copy(update={"sequences": 2 * rows})})
    added = bill.memory_of_microbatches(two, rows).parts(rows * recipe.input.texts_per_row)
    expected = bill.fixed_bytes(two) + total_bytes(added)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    else:
        _HIGH_WATER.write_text("5")  # the kernel begins anew with the highest that it has seen
    before = torch.cuda.memory_allocated() if GPU else _status_bytes("VmRSS")
    engine = engine_of(recipe, recipe.zero, recipe.precision)
    steps = Steps(recipe, 2, rows, phase.length, even=True)
    for step in range(2):
        steps.take(engine, step)
    peak = (torch.cuda.max_memory_allocated() if GPU else _status_bytes("VmHWM")) - before
    figure(f"{rows} rows of {phase.length}, estimated", expected / 2**30, "GiB")
    figure(f"{rows} rows of {phase.length}, peak", peak / 2**30, "GiB")
    if GPU:  # libraries and code count on a CPU, and are larger than a small network
        assert _BELOW <= peak / expected <= _ABOVE + _WORKSPACE_BYTES / expected


@pytest.mark.usefixtures("group")
def test_training_goes_on_where_memory_gave_out() -> None:
    """A rehearsal finds that a large microbatch does not fit. A step with it raises an error that is recognised as a
    lack of memory. Training goes on with small microbatches and the same losses as before."""
    recipe = recipe_of(RECIPES[0])
    length = recipe.phases[0].length
    large = Steps(recipe, 1, 256 if GPU else 16_384, length, even=True)
    few = Steps(recipe, 1, 4, length, even=True)
    engines = [engine_of(recipe, 1, recipe.precision) for _ in range(2)]
    for engine in engines:
        for step in range(2):
            few.take(engine, step)
    expected = losses(few.take(engines.pop(0), 2)[0])
    (engine,) = engines
    _release()
    with _limited():
        _run_short(engine, large, few)
    found = losses(few.take(engine, 2)[0])
    assert max(abs(found[name] - loss) / abs(loss) for name, loss in expected.items()) <= _MAX_APART


def _run_short(engine: Engine, large: Steps, few: Steps) -> None:
    work = large.work(engine, 5)
    assert not Rehearsal(engine, 0).fits(work.microbatches, {})
    assert Rehearsal(engine, 0).fits(few.work(engine, 5).microbatches, {})
    with torch.enable_grad(), pytest.raises(RuntimeError) as raised:
        engine.objective(work.microbatches[0].batch)
    assert is_out_of_memory(raised.value)
    del raised
    _release()


@contextmanager
def _limited() -> Iterator[None]:
    """Leave about 2 GiB more than is in use: of a GPU's memory, or of the process's address space."""
    if GPU:
        total = torch.cuda.get_device_properties(0).total_memory
        share = (torch.cuda.memory_reserved() + _LEFT_BYTES) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status_bytes("VmSize") + _LEFT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
