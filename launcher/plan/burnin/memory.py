"""Checks of memory: the estimate against the peak, and what happens when memory runs out."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from encoder_core.train.engine import Engine
from encoder_core.train.rehearsal import Rehearsal, ran_out
from launcher.plan.burnin.check import Bench
from launcher.plan.burnin.machine import device_of
from launcher.plan.burnin.networks import Steps, engine_of, joined, losses, recipe_of
from launcher.runtime.capacity.devices import usable
from launcher.runtime.capacity.memory_fit import Bill, rows_that_fit
from launcher.runtime.recipe.schema import Recipe

_ABOVE, _BELOW = 1.15, 0.5  # of the estimate may the peak be
_SLACK = 0.3 * 2**30  # that kernels' workspaces and the allocator's blocks take beside
_APART = {"gpu": 1e-3, "cpu": 0.0}  # sums on a GPU have no order of their own
_ROWS = 16  # the most of a microbatch
_STATUS, _HIGH_WATER = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def estimated(bench: Bench) -> None:
    """Compare the peak of two steps of each recipe with its estimate. Microbatches have as many rows as the estimate
    says fit, at most 16.
    """
    with joined(device_of(bench), bench.folder):
        for name in bench.request.recipes:
            with bench.report.attempt(name):
                _peak(bench, recipe_of(bench, name))
            _release(bench)


def _peak(bench: Bench, recipe: Recipe) -> None:
    phase = recipe.phases[-1]
    bill = Bill.of(recipe, 1, "cuda" if bench.gpu else "cpu")
    room = usable(torch.cuda.get_device_properties(0).total_memory) if bench.gpu else 4 << 30
    rows = min(_ROWS, rows_that_fit(bill, room)[-1])
    two = phase.model_copy(update={"batch": phase.batch.model_copy(update={"sequences": 2 * rows})})
    expected = bill.with_rows(two, rows)
    before = _begin(bench)
    engine = engine_of(recipe, recipe.zero, recipe.precision)
    steps = Steps(recipe, 2, rows, phase.length, even=True)
    for step in range(2):
        steps.take(engine, step)
    found = _end(bench) - before
    what = f"{recipe.name}, {rows} rows of {phase.length}"
    bench.report.figure(f"{what}: estimated", expected / 2**30, "GiB")
    bench.report.figure(f"{what}: peak", found / 2**30, "GiB")
    if bench.gpu:
        bench.report.at_most(f"{what}: peak, of the estimate", found / expected, _ABOVE + _SLACK / expected)
        bench.report.at_least(f"{what}: peak, of the estimate", found / expected, _BELOW)
    else:  # libraries and code count there, and are larger than a small network
        bench.report.holds(f"{what}: memory was filled", found > 0)


def _begin(bench: Bench) -> int:
    """Return the bytes in use, from which the peak is counted."""
    if bench.gpu:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    _HIGH_WATER.write_text("5")  # the kernel begins anew with the highest that it has seen
    return _status("VmRSS")


def _end(bench: Bench) -> int:
    return torch.cuda.max_memory_allocated() if bench.gpu else _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text("utf-8").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def _release(bench: Bench) -> None:
    gc.collect()
    if bench.gpu:
        torch.cuda.empty_cache()


def shortage(bench: Bench) -> None:
    """Check three things with little memory left. A rehearsal finds that a large microbatch does not fit. A step with
    it raises an error that is recognised as a lack of memory. Training continues with small microbatches and the same
    losses as before.
    """
    with joined(device_of(bench), bench.folder):
        recipe = recipe_of(bench, bench.request.recipes[0])
        length = recipe.phases[0].length
        large = Steps(recipe, 1, 256 if bench.gpu else 16_384, length, even=True)
        small = Steps(recipe, 1, 4, length, even=True)
        precision = recipe.precision
        engine = engine_of(recipe, 1, precision)
        for step in range(2):
            small.take(engine, step)
        expected = losses(small.take(engine, 2)[0])
        other = engine_of(recipe, 1, precision)
        for step in range(2):
            small.take(other, step)
        del engine
        _release(bench)
        with _limited(bench):
            _short(bench, other, large, small)
        found = losses(small.take(other, 2)[0])
        apart = max(abs(found[name] - loss) / abs(loss) for name, loss in expected.items())
        bench.report.at_most("training goes on: losses differ by", apart, _APART[bench.request.form])


def _short(bench: Bench, engine: Engine, large: Steps, small: Steps) -> None:
    work = large.work(engine, 5)
    fits = Rehearsal(engine, 0).fits(work.microbatches, {})
    bench.report.holds("a rehearsal finds that a large microbatch does not fit", not fits)
    fits = Rehearsal(engine, 0).fits(small.work(engine, 5).microbatches, {})
    bench.report.holds("and that a small one does", fits)
    try:
        with torch.enable_grad():
            engine.objective(work.microbatches[0].batch)
    except RuntimeError as error:
        known, text = ran_out(error), f"{type(error).__name__}: {error}"[:200]
    else:
        known, text = False, "no error"
    bench.report.holds("the error of a step that does not fit is known for what it is", known, text)
    _release(bench)


@contextmanager
def _limited(bench: Bench) -> Iterator[None]:
    """Limit memory to about 2 GiB more than is in use on a GPU; on a CPU limit the address space in the same way."""
    if bench.gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        share = (torch.cuda.memory_reserved() + (2 << 30)) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + (2 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
