"""Seats: whatever Ray gives to whom, every rank knows its place among the others, and CUDA shows it its own GPU."""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.after.diagnose.evaluator_process import EvaluatorProcess
from launcher.runtime.cluster.rank_placement import Placement, Seat, SeatError, assign_seats, rank_order
from tests.support.clusters.fake_gpus import shown

ROOT = Path(__file__).parents[4]
KINDS = st.sampled_from(["number", "GPU-", "MIG-"])


@st.composite
def placements(draw: st.DrawFn) -> list[tuple[Placement, list[str]]]:
    """Ranks on up to four nodes, in any order, and the ids of their machine's GPUs. Each node has GPUs of one kind; the
    run has some of them, others may belong to another."""
    found = []
    for node in draw(st.sets(st.sampled_from("abcd"), min_size=1)):
        kind, count = draw(KINDS), draw(st.integers(1, 16))
        ids = [f"{'GPU-' if kind == 'number' else kind}{node}{number:02}" for number in range(count)]
        machine = list(draw(st.permutations(ids)))
        taken = draw(st.lists(st.sampled_from(range(count)), min_size=1, unique=True))
        for number in taken:
            gpu = str(number) if kind == "number" else machine[number]
            found.append((Placement(node, f"10.0.0.{ord(node)}", draw(st.integers(1, 9)), (gpu,)), machine))
    return list(draw(st.permutations(found)))


Seated = list[tuple[Placement, Seat, list[str]]]


def seated(found: Sequence[tuple[Placement, list[str]]]) -> Seated:
    order = rank_order([placement for placement, _ in found])
    assert sorted(order) == list(range(len(found)))
    placed = [found[index] for index in order]
    taken = assign_seats([placement for placement, _ in placed], 1234)
    return [(placement, seat, machine) for (placement, machine), seat in zip(placed, taken, strict=True)]


def by_node(found: Seated) -> list[Seated]:
    nodes: dict[str, Seated] = defaultdict(list)
    for one in found:
        nodes[one[0].node].append(one)
    return list(nodes.values())


@given(placements())
def test_every_rank_has_a_seat_of_its_own(found: list[tuple[Placement, list[str]]]) -> None:
    everyone = seated(found)
    assert [seat.rank for _, seat, _ in everyone] == list(range(len(everyone)))
    assert {seat.master for _, seat, _ in everyone} == {(everyone[0][0].address, 1234)}
    for number, here in enumerate(by_node(everyone)):
        ranks = [seat.rank for _, seat, _ in here]
        assert ranks == list(range(ranks[0], ranks[0] + len(here))), "the ranks of a node follow each other"
        assert [seat.local_rank for _, seat, _ in here] == list(range(len(here)))
        assert {(seat.local_world, seat.node_rank) for _, seat, _ in here} == {(len(here), number)}


@given(placements())
def test_cuda_shows_every_rank_its_nodes_gpus_and_its_own_is_the_one_that_ray_gave_it(
    found: list[tuple[Placement, list[str]]],
) -> None:
    """All ranks of a node see the same GPUs in the same order, and no other run's."""
    for here in by_node(seated(found)):
        own, seen = [], []
        for placement, seat, machine in here:
            environment = seat.environment()
            devices = shown(environment["CUDA_VISIBLE_DEVICES"], machine)
            (given_gpu,) = shown(placement.gpus[0], machine)
            assert devices[seat.device_index] == given_gpu
            assert environment["LOCAL_RANK"] == str(seat.device_index)
            assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
            assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
            assert len(devices) == len(seat.visible_gpus)
            own.append(given_gpu)
            seen.append(devices)
        cut = here[0][1].shares_gpu
        assert seen == ([[gpu] for gpu in own] if cut else [own] * len(own))


@pytest.mark.long
@given(placements(), st.data())
def test_gpus_that_cannot_be_told_apart_are_refused(
    found: list[tuple[Placement, list[str]]], data: st.DataObject
) -> None:
    """A word that names no GPU, two kinds on a node, two ranks with one GPU, a rank with two or none."""
    spoilt = [placement for placement, _ in found]
    index = data.draw(st.integers(0, len(spoilt) - 1))
    victim = spoilt[index]
    beside = [one.gpus[0] for one in spoilt if one.node == victim.node and one is not victim]
    wrong = [("-1",), ("NoDevFiles",), ("",), (victim.gpus[0], victim.gpus[0] + "1")]
    if beside:
        wrong += [(), (beside[0],), ("GPU-x",) if beside[0].isdecimal() else ("7",)]
    gpus = data.draw(st.sampled_from(wrong))
    spoilt[index] = Placement(victim.node, victim.address, victim.pid, gpus)
    with pytest.raises(SeatError) as raised:
        assign_seats([spoilt[index] for index in rank_order(spoilt)], 1)
    assert victim.address in raised.value.problem
    assert "CUDA_VISIBLE_DEVICES" in raised.value.remedy


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "PYTORCH_ALLOC_CONF": "", "NCCL_MNNVL_ENABLE": "2"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    (seat,) = assign_seats([Placement("a", "10.0.0.1", 7, ("MIG-1",))], 1)
    assert {name: seat.environment()[name] for name in kept} == kept


def test_ranks_on_cpus_see_no_gpu() -> None:
    """Ray may have been told that a node has none."""
    (seat,) = assign_seats([Placement("a", "10.0.0.1", 7, ())], 1234)
    assert seat.environment() == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


IMPORTS = {
    "a module": "import {library}",
    "another name": "import {library} as other",
    "a part": "import {library}.part as part",
    "a class": "from {library} import Thing",
    "a function": "from {library}.part import work",
}
"""How a module may have imported a library, and so have something of it among its names."""


@pytest.mark.long
@pytest.mark.parametrize("how", IMPORTS)
def test_the_module_that_imported_a_library_is_named(how: str, tmp_path: Path) -> None:
    """Among those that were there before, those that it imports itself, and those that import the library later."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy/__init__.py").write_text("class Thing: pass\nfrom heavy import part\n")
    (tmp_path / "heavy/part.py").write_text("import heavy\nimport json\ndef work(): pass\n")
    (tmp_path / "guilty.py").write_text(f"import wave\n{IMPORTS[how].format(library='heavy')}\nimport plistlib\n")
    (tmp_path / "outer.py").write_text("import csv\nimport guilty\nfrom heavy import Thing\n")
    (tmp_path / "later.py").write_text("import heavy\n")
    code = "from launcher.runtime.cluster.rank_process import find_importer as of\nprint(of('heavy'))"
    code = f"import outer, later\n{code}"
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=path)
    assert result.stdout.strip() == "guilty", result.stderr


def test_an_evaluator_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hides none from an actor that asks for none, and ranks have them all."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    EvaluatorProcess(idle=False)
    assert shown(os.environ["CUDA_VISIBLE_DEVICES"], ["GPU-a", "GPU-b"]) == []
