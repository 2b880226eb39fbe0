"""Sums of known numbers between ranks: over NCCL on every GPU of the machine, over gloo between two processes of a CPU.

`python -m launcher.plan.burnin.sums REQUEST` is one rank; the first rank writes the findings to a file.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from checkpoints.gloo_peers import GlooPeers
from launcher.errors import EstimateError
from launcher.plan.burnin.check import Bench
from launcher.plan.burnin.machine import known_gpu, seconds_of
from launcher.plan.measure.processes import RankCommand, run_ranks
from launcher.runtime.preflight import findings
from launcher.runtime.preflight.collective import first_sums

_SIZES = (1, 1_000_003, 1 << 24)  # numbers
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PERIOD = 7  # of the numbers that are added up: small whole ones, exact in bf16
_REPEATS = 5
_TIMED = {"gpu": 64 << 20, "cpu": 1 << 20}  # numbers of a timed sum, in fp32
_LIMIT_S, _COLLECTIVE = 200.0, timedelta(seconds=60)
_SHARE = 0.25  # of the link's figure that sums must reach


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    world: int
    gpu: bool
    folder: str


def collectives(bench: Bench) -> None:
    """Check collectives with as many ranks as GPUs, or two on a CPU."""
    world = torch.cuda.device_count() if bench.gpu else 2
    requests = [
        _Request(rank=rank, world=world, gpu=bench.gpu, folder=str(bench.folder)) for rank in range(world)
    ]
    commands = [
        RankCommand(
            [sys.executable, "-P", "-m", "launcher.plan.burnin.sums", one.model_dump_json()],
            {},
            bench.folder / f"rank{one.rank}.log",
        )
        for one in requests
    ]
    bench.report.figure("ranks", float(world))
    try:
        run_ranks(commands, _LIMIT_S)
    except EstimateError as error:
        bench.report.holds("all ranks come to their end", False, error.problem)
        return
    found, first = json.loads((bench.folder / "answer.json").read_text("utf-8"))
    for what, verdict, text in first:  # as before every group of ranks trains
        bench.report.holds(f"first sums of a group: {what}", verdict != "failure", text)
    _judge(bench, found, world)


def _judge(bench: Bench, found: dict[str, float | bool], world: int) -> None:
    for what, value in found.items():
        if isinstance(value, bool):
            bench.report.holds(what, value)
        elif what.endswith("GB/s"):
            bench.report.figure(what.removesuffix(", GB/s"), value, "GB/s")
    rate = found.get("bandwidth of a sum, GB/s")
    gpu = known_gpu() if bench.gpu else None
    if gpu is not None and world > 1 and isinstance(rate, float):
        bench.report.at_least("of the link's figure", rate / (gpu.link / 1e9), _SHARE)


def carry_out(request: _Request) -> None:
    """Run one rank."""
    device = torch.device("cuda", request.rank) if request.gpu else torch.device("cpu")
    if request.gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if request.gpu else "gloo",
        init_method=f"file://{request.folder}/meet",
        rank=request.rank,
        world_size=request.world,
        timeout=_COLLECTIVE,
    )
    try:
        found: dict[str, float | bool] = dict(_exact(request, device))
        found["repeated sums have equal bits"] = _repeated(request, device)
        found["bandwidth of a sum, GB/s"] = _bandwidth(request, device)
        peers = GlooPeers(dist.new_group(backend="gloo"))
        first = findings.sums(first_sums(peers), ["here"] * request.world)["here"]
        everybody: list[dict[str, float | bool] | None] = [None] * request.world
        dist.all_gather_object(everybody, found)
    finally:
        dist.destroy_process_group()
    if request.rank == 0:
        told = [one for one in everybody if one is not None]
        merged = {what: _together([one[what] for one in told]) for what in found}
        told_first = [[one.what, one.verdict, one.found] for one in first]
        Path(request.folder, "answer.json").write_text(json.dumps([merged, told_first]), "utf-8")


def _together(values: list[float | bool]) -> float | bool:
    """Return whether all are true, or the slowest figure."""
    return all(values) if isinstance(values[0], bool) else min(values)


def _numbers(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.arange(size, device=device) % _PERIOD).to(dtype)


def _exact(request: _Request, device: torch.device) -> Iterator[tuple[str, bool]]:
    """Yield checks of sums, and of copies from every rank to every other, with numbers whose result is known."""
    rank, world = request.rank, request.world
    for name, dtype in _DTYPES.items():
        for size in _SIZES:
            base = _numbers(size, dtype, device)
            mine = base * (rank + 1)
            dist.all_reduce(mine)
            yield f"sums of {size:,} in {name}", torch.equal(mine, base * (world * (world + 1) // 2))
        mine, every = (
            _numbers(1000, dtype, device) + rank,
            torch.empty(world * 1000, dtype=dtype, device=device),
        )
        dist.all_gather_into_tensor(every, mine)
        wanted = torch.cat([_numbers(1000, dtype, device) + other for other in range(world)])
        yield f"gathered in {name}", torch.equal(every, wanted)
        if request.gpu:
            part = torch.empty(1000, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(part, wanted)
            yield f"summed and scattered in {name}", torch.equal(part, wanted.chunk(world)[rank] * world)


def _repeated(request: _Request, device: torch.device) -> bool:
    draws = torch.Generator().manual_seed(request.rank)
    numbers = torch.randn(1_000_003, generator=draws).to(device)
    digests = set()
    for _ in range(_REPEATS):
        mine = numbers.clone()
        dist.all_reduce(mine)
        digests.add(hashlib.sha256(mine.cpu().numpy().tobytes()).hexdigest())
    return len(digests) == 1


def _bandwidth(request: _Request, device: torch.device) -> float:
    """Return the bytes a second of each link of a ring; with one rank, those of copies in its own memory."""
    numbers = torch.ones(_TIMED["gpu" if request.gpu else "cpu"], device=device)
    world = request.world
    moved = 4.0 * numbers.numel() * (2 * (world - 1) / world if world > 1 else 1)
    return moved / seconds_of(lambda: dist.all_reduce(numbers), device) / 1e9


if __name__ == "__main__":
    carry_out(_Request.model_validate_json(sys.argv[1]))
