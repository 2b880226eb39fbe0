"""Ranks on nodes with several GPUs, which are not there: each sees what its node's ranks have, and takes its own."""

import _ctypes
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
def test_each_of_sixteen_ranks_on_two_nodes_sees_eight_gpus_and_takes_its_own(
    build: str, tmp_path: Path
) -> None:
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


MACHINES_OF_TWO = {
    "by number": (Node(gpus("GPU", "a", 4), "3,1"), ["GPU-a1", "GPU-a3"]),
    "by id": (Node(gpus("GPU", "b", 2), "GPU-b0,GPU-b1"), ["GPU-b0", "GPU-b1"]),
    "instances": (Node(gpus("MIG", "c", 2), "MIG-c0,MIG-c1"), ["MIG-c0", "MIG-c1"]),
}


@pytest.mark.long
@pytest.mark.parametrize("named", MACHINES_OF_TWO)
def test_ranks_find_their_gpus_however_they_are_named(named: str, tmp_path: Path) -> None:
    """A scheduler gave the run GPUs 3 and 1 of a machine of four; CUDA shows a process one MIG instance only."""
    node, expected = MACHINES_OF_TWO[named]
    (ranks,) = on_nodes(fake_gpus.seated(tmp_path, [node], 2), 1)
    assert [rank.device for rank in ranks] == expected
    seen = [(rank.devices, rank.number, rank.local_rank) for rank in ranks]
    assert seen == ([(1, 0, 0), (1, 0, 1)] if named == "instances" else [(2, 0, 0), (2, 1, 1)])


@pytest.mark.long
def test_ranks_of_several_nodes_find_their_gpus(tmp_path: Path) -> None:
    machines, expected = zip(*MACHINES_OF_TWO.values(), strict=True)
    nodes = on_nodes(fake_gpus.seated(tmp_path, list(machines), 6), 3)
    assert sorted(sorted(rank.device for rank in ranks) for ranks in nodes) == sorted(expected)


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
from launcher.after.evaluate import measures
from launcher.after.evaluate.cells import CellFigures, MeasureSpec, plan_cells
from launcher.after.evaluate.grid import CellResources, compute_cells
from launcher.after.finetune.pretrained import LocalModel
from tests.support.clusters import fake_gpus

def looked(pretrained, seed, place):
    assert measures  # which CUDA is asked by when a cell is unpickled
    return CellFigures(metrics={"gpus": 0.0}, details={"seen": fake_gpus.CUDA.devices()})

ray.init(num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
Path(sys.argv[1]).mkdir()
(Path(sys.argv[1]) / "config.json").write_text("{}")
model = LocalModel("model", None, Path(sys.argv[1]), "digest")
for gpus in (0.0, 1.0):
    looking = MeasureSpec("looking", "a", None, "a", {}, looked, seeded=True)
    ended = compute_cells(plan([model], [looking], [0, 1]), {"digest": model}, CellResources(1.0, gpus))
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
    """A cell's process is told its GPUs after that. That CUDA is seen to be asked, the cells' measures show."""
    code = "import importlib\nfrom tests.support.clusters.fake_gpus import CUDA\n"
    code += "for name in ('grid', 'measures'):\n"
    code += "    importlib.import_module(f'launcher.after.evaluate.{name}')\n    print(CUDA.asked)"
    environment = fake_gpus.environment(tmp_path)
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=fake_gpus.ROOT)
    assert result.stdout.split() == ["False", "True"], result.stderr


WORDS = st.sampled_from(
    [*map(str, range(5)), "-1", "", "NoDevFiles", "GPU-a0", "GPU-a1", "GPU-a", "MIG-c0", "MIG-c2"]
)
MACHINES = st.sampled_from([gpus("GPU", "a", 4), gpus("MIG", "c", 3), ["GPU-b0", "GPU-a0"], []])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_gpus.compiled(tmp_path_factory.mktemp("library"))


@given(st.none() | st.lists(WORDS, min_size=1, max_size=5).map(", ".join), MACHINES)
def test_both_stand_ins_for_cuda_show_the_same_devices(
    library: Path, variable: str | None, machine: list[str]
) -> None:
    with mock.patch.dict(os.environ, {fake_gpus.MACHINE: ",".join(machine)}):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if variable is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = variable
        cuda = ctypes.CDLL(str(library))
        cuda.fake_device.restype = ctypes.c_char_p
        names = [cuda.fake_device(number).decode() for number in range(6)]
        _ctypes.dlclose(cuda._handle)  # the next one asks anew
    assert [name for name in names if name] == fake_gpus.shown(variable, machine)
