"""A rank that dies is noticed at once, named, and never leaves another rank behind."""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import EstimateError
from launcher.plan.measure import processes
from launcher.plan.measure.processes import RankCommand, run_ranks

PATIENCE_S = 300.0  # far more than a rank's start takes, far less than a lost collective

GROUP = """
import os, signal, sys
import torch, torch.distributed as dist
rank, meeting, when = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
if rank == 1 and when == "before":
    os.kill(os.getpid(), signal.SIGKILL)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.recv(torch.zeros(1), src=1)
"""

ENDS = {
    "well": "exit 0",
    "waits": "exec sleep 600",
    "killed": "kill -9 $$",
    "mistake": "echo 'ValueError: no such row' >&2; exit 1",
    "consequence": "echo 'RuntimeError: [gloo/transport/tcp] Connection closed by peer' >&2; exit 1",
}
SAID = {
    "killed": "killed by signal 9",
    "mistake": "no such row",
    "consequence": "closed by peer",
}  # the worst first


def shells(ends: list[str], folder: Path) -> list[RankCommand]:
    return [
        RankCommand(["sh", "-c", ENDS[end]], {"MARK": str(folder)}, folder / f"{rank}.log")
        for rank, end in enumerate(ends)
    ]


def left(folder: Path) -> list[int]:
    """Processes that were started with this folder as their mark."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.environ().get("MARK") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@settings(max_examples=12, deadline=None)
@given(ends=st.lists(st.sampled_from(["well", *SAID]), min_size=1, max_size=4))
def test_the_rank_that_failed_is_named(ends: list[str]) -> None:
    failing = [end for end in SAID if end in ends]
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_OTHERS_S", 20.0)  # on a busy machine a process may take seconds to start
        commands = shells(ends, Path(name))
        if not failing:
            run_ranks(commands, PATIENCE_S)
            return
        with pytest.raises(EstimateError) as raised:
            run_ranks(commands, PATIENCE_S)
        told = raised.value.problem
        assert SAID[failing[0]] in told, "the cause, not a consequence"
        assert any(
            f"rank {rank} of {len(ends)} " in told for rank, end in enumerate(ends) if end == failing[0]
        )


def test_ranks_that_do_not_end_are_ended(tmp_path: Path) -> None:
    with pytest.raises(EstimateError, match=r"\bwithin [\d.]+ minutes\b"):
        run_ranks(shells(["waits", "well"], tmp_path), 0.3)
    assert left(tmp_path) == []


@pytest.mark.parametrize("when", ["before", pytest.param("inside", marks=pytest.mark.long)])
def test_a_killed_rank_on_which_the_first_waits(when: str, tmp_path: Path) -> None:
    """`before`: rank 0 waits for rank 1 to join. `inside`: for what rank 1 is to send."""
    commands = [
        RankCommand(
            [sys.executable, "-c", GROUP, str(tmp_path / "meet"), when],
            {"RANK": str(rank), "MARK": str(tmp_path)},
            tmp_path / f"{rank}.log",
        )
        for rank in range(2)
    ]
    began = time.monotonic()
    with pytest.raises(EstimateError, match=r"\brank 1 of 2 .*\bsignal 9\b"):
        run_ranks(commands, 2 * PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S
    assert left(tmp_path) == []
