"""One process of sums whose other rank dies again and again: `python -m tests.gpu.deaths REQUEST`.

NCCL does not let ranks share a GPU. On a machine with one GPU both ranks claim to be on machines of their own
(`NCCL_HOSTID`), so NCCL connects them over the network, as it does ranks of two machines.
"""

import json
import sys
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel

from encoder_core.train.engine import leave_groups
from encoder_core.train.exchange import RankGroup
from encoder_core.train.groups import abort_groups, leave_count

DEATHS = 4
LIMIT_S = 180.0  # for one round, imports included
_NUMBERS = 1 << 20  # of a sum
_LAST_SUMS = 20  # with the rank that does not die
_POLL_S = 0.01


class Request(BaseModel, frozen=True, extra="forbid"):
    """`rounds`: those in which this process sums. `gpus`: how many the machine has, 0: gloo on its CPU."""

    rounds: tuple[int, ...]
    gpus: int
    folder: str


class Round(BaseModel, frozen=True, extra="forbid"):
    """Of a round of the process that stays: seconds from the death until it had left, the number of wrong sums, and
    bytes of the GPU's memory in use afterwards."""

    seconds: float
    wrong: int
    memory: int


def await_file(path: Path, seconds: float = LIMIT_S) -> bool:
    """Wait until `path` exists; return False if the time is up."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def carry_out(request: Request) -> None:
    """Sum in every round with the other rank, as rank 0 and as rank 1 by turns."""
    folder, found, stays = Path(request.folder), list[dict[str, object]](), len(request.rounds) > 1
    for turn in request.rounds:
        if turn:  # before, the last rank may still be there
            await_file(folder / f"gone {turn - 1}")
        gone, last, right = folder / f"gone {turn}", turn == DEATHS, list[bool]()
        if stays and not last:
            threading.Thread(target=_watch, args=(gone, leave_count()), daemon=True).start()
        with nullcontext() if last else suppress(RuntimeError):
            _sum_up(request, turn, turn % 2 if stays else 1 - turn % 2, right)
        leave_groups(broken=not last)
        seconds = time.time() - gone.stat().st_mtime if gone.exists() else 0.0
        one = Round(seconds=seconds, wrong=right.count(False), memory=_memory(request))
        found.append(one.model_dump())
    if stays:
        (folder / "answer.json").write_text(json.dumps(found), "utf-8")


def _watch(gone: Path, left: int) -> None:
    """Free the main thread once the other rank is gone, as a rank's heartbeats do."""
    if await_file(gone):
        abort_groups(left)


def _memory(request: Request) -> int:
    if not request.gpus:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _sum_up(request: Request, turn: int, rank: int, right: list[bool]) -> None:
    """Join the other rank, and sum in two groups at once, as an engine does, until it dies; in the last round a few
    times. Add to `right` whether sums are right.

    Raises RuntimeError: of gloo, NCCL or ours, once the other rank is dead.
    """
    device = torch.device("cuda", rank if request.gpus > 1 else 0) if request.gpus else torch.device("cpu")
    if request.gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if request.gpus else "gloo",
        init_method=f"file://{request.folder}/meet{turn}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LIMIT_S),
    )
    groups, control = [None, dist.new_group()], RankGroup.join()
    while turn < DEATHS or len(right) < _LAST_SUMS:
        sums = [torch.full((_NUMBERS,), float(rank + len(right)), device=device) for _ in groups]
        for tensor, group in zip(sums, groups, strict=True):
            dist.all_reduce(tensor, group=group)
        expected = 2 * len(right) + 1
        found = all(bool((tensor == expected).all()) for tensor in sums)
        control.gather_rows([expected])  # raises if the sums were aborted
        right.append(found)
        Path(request.folder, f"sums {turn}").touch()


if __name__ == "__main__":
    carry_out(Request.model_validate_json(sys.argv[1]))
