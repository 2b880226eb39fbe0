"""Sums between ranks: over NCCL on every GPU of the machine, over gloo between two processes of a CPU."""

import json
import os
import random
import subprocess
import time
from pathlib import Path

import torch

from launcher.runtime.preflight.network import local_address, rank_network_variables
from tests.gpu import deaths, sums
from tests.gpu.machine import GPU, Figure, finish, known_gpu, start

_LINK_SHARE = 0.25  # of the link's figure that sums must reach
_LATEST_S = 1.0  # of a death, after both ranks have begun to sum
_LEFT_S = 5.0  # time that ranks have before they are killed, too
_GPUS = torch.cuda.device_count() if GPU else 0


def test_ranks_add_up_known_numbers_exactly_and_alike(tmp_path: Path, figure: Figure) -> None:
    world, log = _GPUS or 2, tmp_path / "log"
    requests = [sums.Request(rank=rank, world=world, folder=str(tmp_path)) for rank in range(world)]
    finish([start("sums", one.model_dump_json(), log) for one in requests], log, 200.0)
    found = sums.Found(**json.loads((tmp_path / "answer.json").read_text("utf-8")))
    assert [what for what, right in found.right.items() if not right] == []
    assert [one for one in found.first if one[1] == "failure"] == []
    figure("ranks", world, "")
    figure("bandwidth of a sum", found.bandwidth / 1e9, "GB/s")
    gpu = known_gpu()
    if gpu is not None and world > 1:
        assert found.bandwidth >= _LINK_SHARE * gpu.link


def test_a_process_outlives_the_other_rank_again_and_again(tmp_path: Path, figure: Figure) -> None:
    """It leaves its sums with a rank that was killed, and then sums rightly with another one."""
    draws, log, turns = random.Random(0), tmp_path / "log", range(deaths.DEATHS + 1)
    processes: list[subprocess.Popen[bytes]] = []
    for rounds in (tuple(turns), *((turn,) for turn in turns)):
        request = deaths.Request(rounds=rounds, gpus=_GPUS, folder=str(tmp_path))
        apart = {"NCCL_HOSTID": f"host{len(processes)}"} if _GPUS == 1 else {}
        network = dict(rank_network_variables(local_address(), os.environ))
        processes.append(start("deaths", request.model_dump_json(), log, network | apart))
    stays, *others = processes
    try:
        for turn, other in enumerate(others[:-1]):
            assert deaths.await_file(tmp_path / f"sums {turn}"), log.read_text("utf-8", errors="replace")
            time.sleep(draws.uniform(0, _LATEST_S))
            other.kill()
            other.wait()
            (tmp_path / f"gone {turn}").touch()
        finish([stays], log, deaths.LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [deaths.Round(**one) for one in json.loads((tmp_path / "answer.json").read_text("utf-8"))]
    assert max(one.seconds for one in found[:-1]) <= _LEFT_S
    assert sum(one.wrong for one in found) == 0
    figure("slowest", max(one.seconds for one in found[:-1]), "s")
    figure("memory of the GPU that later deaths cost", (found[-2].memory - found[0].memory) / 2**20, "MiB")
