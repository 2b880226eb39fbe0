"""A process that outlives the other rank again and again: it leaves its sums, and sums with a new one.

NCCL does not let ranks share a GPU. On a machine with one GPU both ranks claim to be on machines of their own, so NCCL
connects them over the network, as it does ranks of two machines.

`python -m launcher.plan.burnin.deaths REQUEST` is one process.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from encoder_core.train.engine import leave_groups
from encoder_core.train.exchange import Control
from encoder_core.train.groups import abort_groups, times_left
from launcher.plan.burnin.check import Bench
from launcher.runtime.preflight.network import address_here, variables

DEATHS = 4
_NUMBERS = 1 << 20  # of a sum
_LAST_SUMS = 20  # with the rank that does not die
_LATEST_S = 1.0  # of a death, after both ranks have begun to sum
_LEFT_S = 5.0  # time that ranks have before they are killed, too
_LIMIT_S = 60.0  # for one round
_POLL_S = 0.01


class _Request(BaseModel):
    """`rounds`: in which this process sums. `gpus`: how many the machine has, 0: gloo on its CPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    rounds: tuple[int, ...]
    gpus: int
    folder: str


def outlived(bench: Bench) -> None:
    """Check that a process gets away from the sums with a rank that was killed, and then sums rightly with another,
    `DEATHS` times over. It is rank 0 and rank 1 by turns."""
    draws, gpus = random.Random(0), torch.cuda.device_count() if bench.gpu else 0
    requests = [
        _Request(name=f"rank {turn}", rounds=(turn,), gpus=gpus, folder=str(bench.folder))
        for turn in range(DEATHS + 1)
    ]
    staying = _Request(name="stays", rounds=tuple(range(DEATHS + 1)), gpus=gpus, folder=str(bench.folder))
    with ExitStack() as ending:
        process = _start(staying, ending)
        others = [_start(request, ending) for request in requests]
        for turn, other in enumerate(others[:-1]):
            if not _await(bench.folder / f"sums {turn}", process):
                break
            time.sleep(draws.uniform(0, _LATEST_S))
            other.kill()
            other.wait()
            (bench.folder / f"gone {turn}").touch()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LIMIT_S)
        code = process.poll()
    log = (bench.folder / "stays.log").read_text("utf-8", errors="replace")[-600:]
    bench.report.holds("the process outlives all deaths", code == 0, f"code {code}{log if code else ''}")
    if code == 0:
        _tell(bench, json.loads((bench.folder / "answer.json").read_text("utf-8")))


def _tell(bench: Bench, found: list[dict[str, float]]) -> None:
    seconds = [one["seconds"] for one in found[:-1]]
    bench.report.at_most("seconds until it has left", max(seconds), _LEFT_S, "s")
    bench.report.figure("median of them", sorted(seconds)[len(seconds) // 2], "s")
    bench.report.holds("all sums are right", not sum(one["wrong"] for one in found))
    if bench.gpu:
        grown = found[-2]["memory"] - found[0]["memory"]
        bench.report.figure("memory of the GPU that later deaths cost", grown / 2**20, "MiB")


def _start(request: _Request, ending: ExitStack) -> "subprocess.Popen[bytes]":
    with Path(request.folder, f"{request.name}.log").open("wb") as log:
        apart = {"NCCL_HOSTID": request.name.replace(" ", "")} if request.gpus == 1 else {}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.plan.burnin.deaths", request.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | variables(address_here(), os.environ) | apart,
        )
    ending.callback(process.wait)
    ending.callback(process.kill)
    return process


def _await(path: Path, process: "subprocess.Popen[bytes] | None" = None) -> bool:
    """Wait until `path` exists; return False if `process` has ended, or the time is up."""
    deadline = time.monotonic() + _LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            return False
        time.sleep(_POLL_S)
    return True


def carry_out(request: _Request) -> None:
    """Run one process through its rounds."""
    folder, found = Path(request.folder), list[dict[str, float]]()
    stays = len(request.rounds) > 1
    for turn in request.rounds:
        if turn:  # before, the last rank may still be there
            _await(folder / f"gone {turn - 1}")
        rank = turn % 2 if stays else 1 - turn % 2
        last, right = turn == DEATHS, list[bool]()
        if stays and not last:
            threading.Thread(target=_watch, args=(folder / f"gone {turn}", times_left()), daemon=True).start()
        with nullcontext() if last else suppress(RuntimeError):
            _sum_up(request, turn, rank, right)
        leave_groups(broken=not last)
        found.append(
            {
                "seconds": _since(folder / f"gone {turn}"),
                "wrong": right.count(False),
                "memory": _memory(request),
            }
        )
    if stays:
        (folder / "answer.json").write_text(json.dumps(found), "utf-8")


def _watch(gone: Path, left: int) -> None:
    """Free the main thread once the other rank is gone, as a rank's heartbeats do."""
    if _await(gone):
        abort_groups(left)


def _since(path: Path) -> float:
    return time.time() - path.stat().st_mtime if path.exists() else 0.0


def _memory(request: _Request) -> float:
    if not request.gpus:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def _sum_up(request: _Request, turn: int, rank: int, right: list[bool]) -> None:
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
        timeout=timedelta(seconds=_LIMIT_S),
    )
    groups, control = [None, dist.new_group()], Control.join()
    while turn < DEATHS or len(right) < _LAST_SUMS:
        sums = [torch.full((_NUMBERS,), float(rank + len(right)), device=device) for _ in groups]
        for tensor, group in zip(sums, groups, strict=True):
            dist.all_reduce(tensor, group=group)
        expected = 2 * len(right) + 1
        found = all(bool((tensor == expected).all()) for tensor in sums)
        control.table([expected])  # raises if the sums were aborted
        right.append(found)
        Path(request.folder, f"sums {turn}").touch()


if __name__ == "__main__":
    carry_out(_Request.model_validate_json(sys.argv[1]))
