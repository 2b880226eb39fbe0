"""Ranks on nodes with several GPUs, which are not there: each sees what its node's ranks have, and takes its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clusters import fake_gpus
from tests.support.clusters.fake_gpus import Found, Node, RankFound

pytestmark = [pytest.mark.cluster]


def gpus(kind: str, node: str, count: int) -> list[str]:
    return [f"{kind}-{node}{number}" for number in range(count)]


def on_nodes(found: Found, count: int) -> list[list[RankFound]]:
    """The ranks of each node, in their order there."""
    assert (found.failed, found.problem) == ([], "")
    ranks = sorted(found.ranks, key=lambda rank: rank.rank)
    assert [rank.rank for rank in ranks] == list(range(len(ranks)))
    return [[rank for rank in ranks if rank.node == node] for node in range(count)]


CUDA_BUILD = "MASKFLEET_CUDA_PYTHON"
"""The variable that names the python of an environment with torch's CUDA build."""


@pytest.mark.long
@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_each_of_sixteen_ranks_on_two_nodes_sees_eight_gpus_and_takes_its_own(build: str, tmp_path: Path) -> None:
    """On one node nothing is said of GPUs, so Ray numbers them; the other's scheduler names them by their ids. torch's
    CUDA build asks a CUDA that has no GPU."""
    one, other = gpus("GPU", "a", 8), gpus("GPU", "b", 8)
    python, more = sys.executable, {}
    if build == "cuda":
        if CUDA_BUILD not in os.environ:
            pytest.skip(f"{CUDA_BUILD} does not name the python of an environment with torch's CUDA build")
        python, more = os.environ[CUDA_BUILD], {"LD_PRELOAD": str(fake_gpus.compiled(tmp_path))}
    found = fake_gpus.seated(tmp_path, [Node(one), Node(other, ",".join(other))], 16, python, **more)
    nodes = on_nodes(found, 2)
    assert sorted([rank.device for rank in ranks] for ranks in nodes) == [one, other]
    for ranks in nodes:
        assert [rank.local_rank for rank in ranks] == list(range(8))
        assert all((rank.devices, rank.number) == (8, rank.local_rank) for rank in ranks)


@pytest.mark.long
def test_ranks_of_several_nodes_find_their_gpus_however_they_are_named(tmp_path: Path) -> None:
    """A scheduler gave the run GPUs 3 and 1 of a machine of four, the next one's by their ids; CUDA shows a process one
    MIG instance only."""
    machines = [
        Node(gpus("GPU", "a", 4), "3,1"),
        Node(gpus("GPU", "b", 2), "GPU-b0,GPU-b1"),
        Node(gpus("MIG", "c", 2), "MIG-c0,MIG-c1"),
    ]
    found = {}
    for ranks in on_nodes(fake_gpus.seated(tmp_path, machines, 6), 3):
        seen = [(rank.devices, rank.number, rank.local_rank) for rank in ranks]
        found[tuple(rank.device for rank in ranks)] = seen
    assert found == {
        ("GPU-a1", "GPU-a3"): [(2, 0, 0), (2, 1, 1)],
        ("GPU-b0", "GPU-b1"): [(2, 0, 0), (2, 1, 1)],
        ("MIG-c0", "MIG-c1"): [(1, 0, 0), (1, 0, 1)],
    }


@pytest.mark.long
def test_torch_that_is_there_before_the_seat_is_an_error_that_names_who_imported_it(tmp_path: Path) -> None:
    """Every rank but the first of its node would find no GPU: CUDA has been asked, and showed the one that Ray gave."""
    early = "launcher.errors"  # unpickling the actor imports it
    found = fake_gpus.seated(tmp_path, [Node(gpus("GPU", "a", 2))], 2, **{fake_gpus.EARLY: early})
    assert found.ranks == []
    assert found.failed != []
    assert early in found.problem
    assert "torch" in found.problem


CELLS = """
import json, sys
from pathlib import Path
import ray
from launcher.after.finetune import model as torch_user
from launcher.after.evaluate.cells import CellFigures, MeasureSpec, plan_cells
from launcher.after.evaluate.grid import CellResources, compute_cells
from launcher.after.finetune.pretrained import LocalModel
from tests.support.clusters import fake_gpus

def looked(pretrained, seed):
    assert torch_user  # which imports torch when a cell is unpickled
    return CellFigures(metrics={"gpus": 0.0}, details={"seen": fake_gpus.CUDA.devices()})

ray.init("local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
Path(sys.argv[1]).mkdir()
(Path(sys.argv[1]) / "config.json").write_text("{}")
model = LocalModel("model", None, Path(sys.argv[1]), "digest")
for gpus in (0.0, 1.0):
    looking = MeasureSpec("looking", "a", None, "a", {}, looked, seeded=True)
    ended = compute_cells(plan_cells([model], [looking], [0, 1]), {"digest": model}, CellResources(1.0, gpus))
    print(json.dumps([outcome.details["seen"] for _, outcome in ended]))
"""


@pytest.mark.long
def test_cells_see_the_gpus_that_they_were_given_and_no_others(tmp_path: Path) -> None:
    """With `--gpus-per-cell 0` none: Ray itself would let them see all of the node's."""
    machine = gpus("GPU", "a", 2)
    environment = fake_gpus.environment(tmp_path, **{fake_gpus.MACHINE: ",".join(machine)})
    command = [sys.executable, "-c", CELLS, str(tmp_path / "cells")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=fake_gpus.ROOT)
    assert result.returncode == 0, result.stderr
    without, with_one = map(json.loads, result.stdout.splitlines()[-2:])
    assert without == [[], []]
    assert all(len(seen) == 1 and seen[0] in machine for seen in with_one)


@pytest.mark.long
def test_the_cells_task_does_not_ask_cuda_when_it_is_imported(tmp_path: Path) -> None:
    """A cell's process is told its GPUs after that. That asking is seen, torch shows."""
    code = "import importlib\nfrom tests.support.clusters.fake_gpus import CUDA\n"
    code += "for name in ('evaluate.grid', 'evaluate.measures', 'finetune.model'):\n"
    code += "    importlib.import_module(f'launcher.after.{name}')\n    print(CUDA.asked)\n"
    code += "import torch\ntorch.cuda.is_available()\nprint(CUDA.asked)"
    environment = fake_gpus.environment(tmp_path)
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=fake_gpus.ROOT)
    assert result.stdout.split() == ["False", "False", "False", "True"], result.stderr
