"""One rank of sums of known numbers: `python -m tests.gpu.sums REQUEST`. The first rank writes what all found."""

import hashlib
import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor

from checkpoints.gloo_peers import GlooPeers
from launcher.runtime.preflight import findings
from launcher.runtime.preflight.collective import first_sums
from tests.gpu.machine import GPU, seconds_of

_SIZES = (1, 1_000_003, 1 << 24)  # numbers
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PERIOD = 7  # of the numbers that are added up: small whole ones, exact in bf16
_REPEATS = 5
_TIMED_NUMBERS = (64 << 20) if GPU else (1 << 20)
_COLLECTIVE = timedelta(seconds=60)


class Request(BaseModel, frozen=True, extra="forbid"):
    rank: int
    world: int
    folder: str


class Found(BaseModel, frozen=True, extra="forbid"):
    """What all ranks found. `right`: each check by name; `first`: (what, verdict, found) of the sums that every group
    of ranks makes before it trains; `bandwidth`: bytes a second of each link of a ring, the slowest rank's."""

    right: dict[str, bool]
    first: list[tuple[str, str, str]]
    bandwidth: float


def carry_out(request: Request) -> None:
    device = torch.device("cuda", request.rank) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if GPU else "gloo",
        init_method=f"file://{request.folder}/meet",
        rank=request.rank,
        world_size=request.world,
        timeout=_COLLECTIVE,
    )
    try:
        right = dict(_exact(request, device)) | {"repeated sums have equal bits": _repeated(request, device)}
        mine = (right, _bandwidth(request, device))
        peers = GlooPeers(dist.new_group(backend="gloo"))
        first = findings.judge_sums(first_sums(peers), ["here"] * request.world)["here"]
        everybody: list[tuple[dict[str, bool], float]] = [mine] * request.world
        dist.all_gather_object(everybody, mine)
    finally:
        dist.destroy_process_group()
    if request.rank == 0:
        found = Found(
            right={what: all(one[what] for one, _ in everybody) for what in right},
            first=[(one.what, one.verdict, one.found) for one in first],
            bandwidth=min(rate for _, rate in everybody),
        )
        Path(request.folder, "answer.json").write_text(json.dumps(found.model_dump()), "utf-8")


def _numbers(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.arange(size, device=device) % _PERIOD).to(dtype)


def _exact(request: Request, device: torch.device) -> Iterator[tuple[str, bool]]:
    """Yield checks of sums, and of copies from every rank to every other, with numbers whose result is known."""
    rank, world = request.rank, request.world
    for name, dtype in _DTYPES.items():
        for size in _SIZES:
            base = _numbers(size, dtype, device)
            mine = base * (rank + 1)
            dist.all_reduce(mine)
            yield f"sums of {size:,} in {name}", torch.equal(mine, base * (world * (world + 1) // 2))
        mine = _numbers(1000, dtype, device) + rank
        every = torch.empty(world * 1000, dtype=dtype, device=device)
        dist.all_gather_into_tensor(every, mine)
        wanted = torch.cat([_numbers(1000, dtype, device) + other for other in range(world)])
        yield f"gathered in {name}", torch.equal(every, wanted)
        if GPU:
            part = torch.empty(1000, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(part, wanted)
            yield f"summed and scattered in {name}", torch.equal(part, wanted.chunk(world)[rank] * world)


def _repeated(request: Request, device: torch.device) -> bool:
    draws = torch.Generator().manual_seed(request.rank)
    numbers, digests = torch.randn(1_000_003, generator=draws).to(device), set[str]()
    for _ in range(_REPEATS):
        mine = numbers.clone()
        dist.all_reduce(mine)
        digests.add(hashlib.sha256(mine.cpu().numpy().tobytes()).hexdigest())
    return len(digests) == 1


def _bandwidth(request: Request, device: torch.device) -> float:
    """Return the bytes a second of each link of a ring; with one rank, those of copies in its own memory."""
    numbers, world = torch.ones(_TIMED_NUMBERS, device=device), request.world
    moved = 4.0 * numbers.numel() * (2 * (world - 1) / world if world > 1 else 1)
    return moved / seconds_of(lambda: dist.all_reduce(numbers), device)


if __name__ == "__main__":
    carry_out(Request.model_validate_json(sys.argv[1]))
