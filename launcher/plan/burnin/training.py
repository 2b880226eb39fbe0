"""Checks of training: every ZeRO stage against the CPU, no waits, equal bits, and state moved between devices."""

import hashlib
import json
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from checkpoints.save import take
from encoder_core.layers.torch_internals import dispatch_mode
from encoder_core.train.engine import Engine
from encoder_core.train.settings import Precision
from encoder_core.train.step import Sums, seed_draws
from encoder_core.train.zero_state import ALL_KINDS
from encoder_core.trials.trial_process import Deadline, Line, follow
from encoder_core.trials.trial_process import Report as Message
from launcher.plan.burnin.check import Bench
from launcher.plan.burnin.machine import device_of
from launcher.plan.burnin.networks import Steps, engine_of, joined, losses, recipe_of, small
from launcher.runtime.rank.build import set_determinism

_STEPS = 20
_BOUND: dict[Precision, float] = {"fp32": 1e-4, "bf16": 1e-2}
_NORM = 10.0  # times as far off may gradient norms be: they are not averaged over targets
_NETWORKS: tuple[str, ...] = (
    "roberta-base",
    "deberta-base",
    "modernbert-base",
)  # without drawn tokens, which rounding may change
_MICROBATCHES, _ROWS, _LENGTH, _RATE = 2, 4, 48, 0.1
_LIMIT_S = 400.0
_SAVED_AFTER = 3  # steps


class Request(BaseModel):
    """A request to a process: the networks that it trains, and how.

    Attributes:
        networks: recipes, trained in their small form.
        runs: stages and precisions, trained in turn.
        steps: number of steps of each run.
        folder: folder of the file through which torch's process group meets.
        deterministic: the recipe setting of that name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    networks: tuple[str, ...]
    runs: tuple[tuple[int, Precision], ...]
    steps: int
    folder: str
    deterministic: bool = False


@dataclass(frozen=True)
class Trace:
    """Losses and gradient norms of each step of a run, and a digest of its final state."""

    losses: list[float]
    norms: list[float]
    digest: str


def train(name: str, stage: int, precision: Precision, steps: int) -> Trace:
    """Train a recipe on this process's device, in torch's process group."""
    recipe = small(name, _RATE)
    engine = engine_of(recipe, stage, precision)
    rows = Steps(recipe, _MICROBATCHES, _ROWS, min(_LENGTH, recipe.model.max_length))
    found, norms = [], []
    for step in range(steps):
        sums, update = rows.take(engine, step)
        found.append(sum(losses(sums).values()))
        norms.append(update.grad_norm)
    return Trace(found, norms, digest(engine))


def digest(engine: Engine) -> str:
    """Return a digest of all master weights and moments, by name."""
    hashed = hashlib.sha256()
    for fragment in sorted(engine.fragments(), key=lambda one: (one.name, one.start)):
        for kind in sorted(fragment.tensors):
            hashed.update(f"{fragment.name}/{kind}/{fragment.start}".encode())
            hashed.update(fragment.tensors[kind].detach().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def serve(request: Message, line: Line) -> None:
    """Train what is asked for in a process of its own, and report each trace."""
    asked = Request.model_validate(request)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    set_determinism(asked.deterministic)
    with joined(device, Path(asked.folder)):
        for name in asked.networks:
            for stage, precision in asked.runs:
                trace = train(name, stage, precision, asked.steps)
                line.report(run=f"{name}/{stage}/{precision}", trace=vars(trace))


def in_process(
    bench: Bench, name: str, request: dict[str, Any], environment: Mapping[str, str]
) -> dict[str, Trace]:
    """Return traces by network, stage and precision from a process of its own.

    Raises:
        TrialEnded: the process failed.
    """
    asked = Request(folder=_made(bench.folder / name), **request)
    found, deadline = {}, Deadline(_LIMIT_S)
    target = "launcher.plan.burnin.training:serve"
    with closing(follow(target, asked.model_dump(mode="json"), deadline, _nothing, environment)) as reports:
        for report in reports:
            found[report["run"]] = Trace(**report["trace"])
            bench.report.doing(f"{name}: {report['run']} is done")
    return found


def _made(folder: Path) -> str:
    folder.mkdir()
    return str(folder)


def _nothing() -> None:
    pass


def zero(bench: Bench, stage: str) -> None:
    """Compare 20 steps at a stage with a reference.

    On a GPU the reference is the CPU at the same stage. On a CPU it is stage 0 in fp32, which shards no sums and
    never rounds weights.
    """
    precisions: list[Precision] = ["fp32"] if stage == "0" else ["fp32", "bf16"]
    mine = [(int(stage), precision) for precision in precisions]
    theirs = mine if bench.gpu else [(0, "fp32")]
    networks = _NETWORKS if bench.gpu else _NETWORKS[:2]  # the CPU's time is for what differs
    shared = {"networks": networks, "steps": _STEPS}
    bench.report.doing("training on the CPU")
    expected = in_process(bench, "reference", {**shared, "runs": theirs}, {"CUDA_VISIBLE_DEVICES": ""})
    bench.report.doing("training on the device")
    found = in_process(bench, "device", {**shared, "runs": mine}, {})
    for key, trace in found.items():
        network, _, precision = key.split("/")
        other = expected[key if bench.gpu else f"{network}/0/fp32"]
        bound = _BOUND["bf16" if precision == "bf16" else "fp32"]
        what = f"{network}, {precision}, {_STEPS} steps"
        bench.report.at_most(f"{what}: losses differ by", _apart(trace.losses, other.losses), bound)
        bench.report.at_most(
            f"{what}: gradient norms differ by", _apart(trace.norms, other.norms), _NORM * bound
        )


def _apart(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(found, expected, strict=True))


def deterministic(bench: Bench) -> None:
    """Check that two processes with `deterministic: true` reach equal losses and equal state, bit for bit."""
    runs = [(1, "fp32"), (1, "bf16")]
    request = {"networks": _NETWORKS, "runs": runs, "steps": _STEPS // 2, "deterministic": True}
    first, second = (in_process(bench, f"turn{turn}", request, {}) for turn in range(2))
    for key, trace in first.items():
        network, _, precision = key.split("/")
        bench.report.holds(f"{network}, {precision}: equal losses", trace.losses == second[key].losses)
        bench.report.holds(f"{network}, {precision}: equal state", trace.digest == second[key].digest)


def waits(bench: Bench) -> None:
    """Check that no operation in a microbatch of each recipe waits for the device."""
    device = device_of(bench)
    with joined(device, bench.folder):
        for name in bench.request.recipes:
            with bench.report.attempt(name):
                recipe = recipe_of(bench, name)
                engine = engine_of(recipe, 1, "bf16")
                rows = Steps(recipe, 1, _ROWS, recipe.phases[0].length)
                for step in range(2):  # the first steps set up what is waited for once
                    rows.take(engine, step)
                found = _waited(engine, rows, bench.gpu)
                bench.report.holds(f"{name}: no wait in a microbatch", not found, ", ".join(found) or "none")
                del engine
                if bench.gpu:
                    torch.cuda.empty_cache()


def _waited(engine: Engine, steps: Steps, gpu: bool) -> list[str]:
    """Return the operations that waited in forward and backward passes of every update group."""
    work, found = steps.work(engine, 2), list[str]()
    memories: dict[int, tuple[torch.Tensor, ...]] = {}
    for group in engine.update_groups:
        engine.begin(group)
        sums = Sums()
        for microbatch in work.microbatches:
            seed_draws(1, 2, microbatch.index, group)
            with _watched(gpu) as seen:
                result = engine(microbatch.batch, memories.get(microbatch.index, ()))
                loss = sum(term.loss_sum for term in result.terms)
                engine.backward(1e-3 * loss, last=False)
                sums.add(result)
                memories[microbatch.index] = result.memory
            found += seen
    return found


@contextmanager
def _watched(gpu: bool) -> Iterator[list[str]]:
    """On a GPU, raise an error at a wait inside; on a CPU, note operations that would wait for a GPU."""
    if not gpu:
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


class _Waits(dispatch_mode()):  # type: ignore[misc]
    """Notes operations whose result the host needs: numbers that it reads, and sizes that depend on data."""

    _NAMES = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "equal",
        "is_nonzero",
        "bincount",
    )

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
        if name in self._NAMES or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def checkpoint(bench: Bench) -> None:
    """Check that state copied to the host, restored into another engine and copied again keeps its bits.

    On a GPU the way is GPU, CPU, GPU. The copy is timed at the size of the first recipe, because training waits for it.
    """
    device, name = device_of(bench), _NETWORKS[0]
    with joined(device, bench.folder):
        engine = engine_of(small(name, _RATE), 1, "bf16")
        rows = Steps(small(name, _RATE), _MICROBATCHES, _ROWS, 32)
        for step in range(_SAVED_AFTER):
            rows.take(engine, step)
        before, state = digest(engine), _copied(engine)
        file = bench.folder / "state.bin"
        file.write_bytes(state)
        through = _through_cpu(bench, file)
        bench.report.holds("to the CPU and back: equal bits", through == state)
        other = engine_of(small(name, _RATE), 1, "bf16")
        _fill(other, through)
        bench.report.holds("restored on the device: equal bits", digest(other) == before)
        ours, theirs = rows.take(engine, _SAVED_AFTER)[0], rows.take(other, _SAVED_AFTER)[0]
        bench.report.holds("the next step: equal losses", losses(ours) == losses(theirs))
        del engine, other
        _stall(bench)


def _copied(engine: Engine) -> bytes:
    """Return all state as a run's checkpoint stores it: a header and its numbers."""
    snapshot = take(engine.fragments())
    return b"".join(bytes(buffer) for buffer in snapshot.buffers)


def _fill(engine: Engine, state: bytes) -> None:
    """Restore what `_copied` returned."""
    size = struct.unpack("<Q", state[:8])[0]
    entries, body = (
        json.loads(state[8 : 8 + size]),
        torch.frombuffer(bytearray(state[8 + size :]), dtype=torch.uint8),
    )
    ranges: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
    for key, entry in entries.items():
        name, kind, start = key.rsplit(":", 2)
        low, high = entry["data_offsets"]
        ranges.setdefault((name, kind), []).append((int(start), body[low:high].view(torch.float32)))

    def read(name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        for first, numbers in ranges[name, kind]:
            if first <= start and stop <= first + numbers.numel():
                return numbers[start - first : stop - first]
        raise RuntimeError(f"{name} {kind} [{start}, {stop}) is not in the state")

    engine.restore(ALL_KINDS, read)


def _through_cpu(bench: Bench, file: Path) -> bytes:
    """Return the state after an engine of another process, without a GPU, has restored and copied it."""
    request = {"file": str(file), "folder": _made(bench.folder / "through")}
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    target = "launcher.plan.burnin.training:serve_state"
    with closing(follow(target, request, Deadline(_LIMIT_S), _nothing, hidden)) as reports:
        for _ in reports:
            pass
    return file.with_suffix(".back").read_bytes()


def serve_state(request: Message, line: Line) -> None:
    """Restore and copy the state, in that other process."""
    file = Path(request["file"])
    with joined(torch.device("cpu"), Path(request["folder"])):
        engine = engine_of(small(_NETWORKS[0], _RATE), 1, "bf16")
        _fill(engine, file.read_bytes())
        file.with_suffix(".back").write_bytes(_copied(engine))


def _stall(bench: Bench) -> None:
    """Measure how long training waits for the copy of a checkpoint: at the first copy, when memory is pinned, and
    later.
    """
    recipe = recipe_of(bench, bench.request.recipes[0])
    engine = engine_of(recipe, 1, "bf16")
    Steps(recipe, 1, 2, recipe.phases[0].length).take(engine, 0)
    body = None
    for turn in ("first", "second", "third"):
        if bench.gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        snapshot = take(engine.fragments(), body)
        seconds = time.perf_counter() - began
        body, size = snapshot.body, snapshot.body.numel()
        bench.report.figure(f"{recipe.name}: the {turn} copy stalls training", seconds, "s")
    bench.report.figure(f"{recipe.name}: bytes copied", size / 2**30, "GiB")
    bench.report.figure(f"{recipe.name}: copied at", size / seconds / 1e9, "GB/s")
