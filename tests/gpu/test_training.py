"""Training: every ZeRO stage against the CPU, no waits, equal bits, and state moved between devices."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from checkpoints.save import take_snapshot
from encoder_core.layers.torch_internals import dispatch_mode_class
from encoder_core.train.engine import Engine
from encoder_core.train.settings import Precision
from encoder_core.train.step import RunningSums, seed_draws
from tests.gpu.machine import GPU, RECIPES, Figure
from tests.gpu.networks import Steps, engine_of, losses, recipe_of, small
from tests.gpu.training import MICROBATCHES, RATE, ROWS, STATE_NETWORK, Request, copied, digest, fill, run

_STEPS = 20
_BOUNDS: dict[str, float] = {"fp32": 1e-4, "bf16": 1e-2}
_NORM_FACTOR = 10.0  # how many times as far off gradient norms may be: they are not averaged over targets
# Networks without drawn tokens, which rounding may change. The CPU's time is for those that differ.
_NETWORKS = ("roberta-base", "deberta-base", "modernbert-base")[: 3 if GPU else 2]


def _apart(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_of_zero_has_the_reference_s_losses(stage: int, tmp_path: Path) -> None:
    """On a GPU the reference is the CPU at the same stage. On a CPU it is stage 0 in fp32, which shards no sums and
    never rounds weights."""
    precisions: tuple[Precision, ...] = ("fp32", "bf16") if stage else ("fp32",)
    mine = tuple((stage, precision) for precision in precisions)
    theirs = mine if GPU else ((0, "fp32"),)
    shared = Request(networks=_NETWORKS, runs=mine, steps=_STEPS, folder=tmp_path / "device")
    update = {"runs": theirs, "folder": tmp_path / "reference", "cpu": True}
    expected, found = run(shared.model_copy(update=update)), run(shared)
    for key, trace in found.items():
        network, _, precision = key.split("/")
        other = expected[key if GPU else f"{network}/0/fp32"]
        assert _apart(trace.losses, other.losses) <= _BOUNDS[precision], key
        assert _apart(trace.norms, other.norms) <= _NORM_FACTOR * _BOUNDS[precision], key


def test_two_deterministic_processes_train_alike_bit_for_bit(tmp_path: Path) -> None:
    shared = Request(
        networks=_NETWORKS,
        runs=((1, "fp32"), (1, "bf16")),
        steps=_STEPS // 2,
        folder=tmp_path / "first",
        deterministic=True,
    )
    first, second = run(shared), run(shared.model_copy(update={"folder": tmp_path / "second"}))
    assert first == second


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", RECIPES)
def test_nothing_in_a_microbatch_waits_for_the_device(name: str) -> None:
    recipe = recipe_of(name)
    engine = engine_of(recipe, 1, "bf16")
    rows = Steps(recipe, 1, ROWS, recipe.phases[0].length)
    for step in range(2):  # the first steps set up what is waited for once
        rows.take(engine, step)
    assert _waited(engine, rows) == []


def _waited(engine: Engine, steps: Steps) -> list[str]:
    """Return the operations that waited in forward and backward passes of every update group."""
    work, found = steps.work(engine, 2), list[str]()
    memories: dict[int, tuple[torch.Tensor, ...]] = {}
    for group in engine.update_groups:
        engine.begin_update_group(group)
        sums = RunningSums()
        for microbatch in work.microbatches:
            seed_draws(1, 2, microbatch.index, group)
            with _watched() as seen:
                result = engine(microbatch.batch, memories.get(microbatch.index, ()))
                loss = sum(term.loss_sum for term in result.terms)
                engine.backward(1e-3 * loss, last=False)
                sums.add(result)
                memories[microbatch.index] = result.memory
            found += seen
    return found


@contextmanager
def _watched() -> Iterator[list[str]]:
    """On a GPU, raise an error at a wait inside; on a CPU, note operations that would wait for a GPU."""
    if not GPU:
        noted = _Waits()
        with noted:
            yield noted.seen
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield []
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _Waits(dispatch_mode_class()):  # type: ignore[misc]
    """Notes operations whose result the host needs: numbers that it reads, and sizes that depend on data."""

    _READ = ("_local_scalar_dense", "is_nonzero", "equal")
    _SIZED_BY_DATA = ("nonzero", "masked_select", "_unique2", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        by_mask = (
            name.startswith("index")
            and len(args) > 1
            and isinstance(args[1], list | tuple)
            and any(index is not None and index.dtype == torch.bool for index in args[1])
        )
        if name in (*self._READ, *self._SIZED_BY_DATA) or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("group")
def test_state_survives_the_way_to_the_cpu_and_back(tmp_path: Path) -> None:
    """On a GPU the way is GPU, CPU, GPU. Restored into another engine, it trains on as the first one does."""
    recipe = small(STATE_NETWORK, RATE)
    engine, rows = engine_of(recipe, 1, "bf16"), Steps(recipe, MICROBATCHES, ROWS, 32)
    for step in range(3):
        rows.take(engine, step)
    before, state, file = digest(engine), copied(engine), tmp_path / "state.bin"
    file.write_bytes(state)
    run(Request(folder=tmp_path / "through", cpu=True, state=file))
    through = file.with_suffix(".back").read_bytes()
    assert through == state
    other = engine_of(recipe, 1, "bf16")
    fill(other, through)
    assert digest(other) == before
    assert losses(rows.take(engine, 3)[0]) == losses(rows.take(other, 3)[0])


@pytest.mark.usefixtures("group")
def test_how_long_a_copy_stalls_training(figure: Figure) -> None:
    """At the first copy, when memory is pinned, and later."""
    recipe = recipe_of(RECIPES[0])
    engine = engine_of(recipe, 1, "bf16")
    Steps(recipe, 1, 2, recipe.phases[0].length).take(engine, 0)
    body, seconds = None, 0.0
    for turn in ("first", "second", "third"):
        if GPU:
            torch.cuda.synchronize()
        began = time.perf_counter()
        snapshot = take_snapshot(engine.fragments(), body)
        seconds, body = time.perf_counter() - began, snapshot.body
        figure(f"{turn} copy", seconds, "s")
    assert body is not None
    figure("copied", body.numel() / 2**30, "GiB")
    figure("copied at", body.numel() / seconds / 1e9, "GB/s")
