"""What is made of what was measured, as tables; every verdict but ok has a remedy."""

import pytest

from launcher.runtime.preflight import findings
from launcher.runtime.preflight.findings import Finding, judge_versions, worst_verdict

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (findings.judge_clock(None), "ok"),
        (findings.judge_clock(0.9), "ok"),
        (findings.judge_clock(-6), "warning"),
        (findings.judge_clock(6), "warning"),
        (findings.judge_clock(-301), "failure"),
        (findings.judge_clock(16 * 60), "failure"),
        (findings.judge_shared_memory(16 * GIB, 15 * GIB, gpus=8), "ok"),
        (findings.judge_shared_memory(64 * MIB, 64 * MIB, gpus=8), "failure"),
        (findings.judge_shared_memory(64 * MIB, 64 * MIB, gpus=1), "warning"),
        (findings.judge_shared_memory(64 * MIB, 64 * MIB, gpus=0), "warning"),
        (findings.judge_shared_memory(16 * GIB, MIB, gpus=8), "warning"),
        (findings.judge_open_files(65_536, 1 << 20), "ok"),
        (findings.judge_open_files(20_000, 20_000), "ok"),
        (findings.judge_open_files(4096, 4096), "warning"),
        (findings.judge_open_files(256, 65_536), "failure"),
        (findings.judge_open_files(256, -1), "failure"),
        (findings.judge_open_files(-1, -1), "ok"),
        (findings.judge_memory(5 * GIB, 8 * GIB), "ok"),
        (findings.judge_memory(3 * GIB, 8 * GIB), "warning"),
        (findings.judge_temporary_disk(6 * GIB, "/tmp"), "ok"),
        (findings.judge_temporary_disk(GIB, "/tmp"), "warning"),
        (findings.judge_checkpoint_disk(4 * GIB, "/runs", GIB, kept=3), "ok"),
        (findings.judge_checkpoint_disk(3 * GIB, "/runs", GIB, kept=3), "warning"),
        (findings.judge_checkpoint_disk(GIB - 1, "/runs", GIB, kept=3), "failure"),
    ],
)
def test_each_finding_has_its_verdict_and_a_remedy_unless_well(finding: Finding, verdict: str) -> None:
    assert finding.verdict == verdict, finding
    assert bool(finding.remedy) == (verdict != "ok")


def test_a_clock_says_which_way_it_is_off() -> None:
    assert findings.judge_clock(301).found == "301.0 s ahead of the store's"
    assert findings.judge_clock(-301).found == "301.0 s behind the store's"


def test_a_node_with_another_version_is_named() -> None:
    common = {"torch": "2.13.0", "maskfleet": "0.1.0+aa"}
    nodes = {"n1": common, "n2": {**common, "torch": "2.12.0"}, "n3": common}
    found = judge_versions(nodes)
    assert found["n1"] == found["n3"] == []
    (finding,) = found["n2"]
    assert (finding.what, finding.verdict) == ("torch", "failure")
    assert "2.12.0" in finding.found
    assert "2.13.0" in finding.found


def test_what_one_node_lacks_is_a_difference() -> None:
    found = judge_versions({"n1": {"NCCL": "2.27"}, "n2": {}, "n3": {"NCCL": "2.27"}})
    assert [len(found[node]) for node in ("n1", "n2", "n3")] == [0, 1, 0]
    assert judge_versions({"n1": {"ray": "1"}}) == {"n1": []}


def test_the_worst_counts() -> None:
    assert worst_verdict([]) == "ok"
    assert worst_verdict([findings.judge_clock(0), findings.judge_clock(6)]) == "warning"
    assert worst_verdict([findings.judge_clock(6), findings.judge_clock(400), findings.judge_clock(0)]) == "failure"


def test_a_torch_without_cuda_has_another_remedy_than_a_machine_without_a_gpu() -> None:
    built, machine = (
        findings.missing_gpu_finding("2.13.0+cpu", None),
        findings.missing_gpu_finding("2.13.0+cu130", "13.0"),
    )
    assert built.verdict == machine.verdict == "warning"
    assert "13.0" in machine.found
    assert built.remedy != machine.remedy


def test_of_two_nodes_neither_is_right() -> None:
    found = judge_versions({"n1": {"ray": "1"}, "n2": {"ray": "2"}})
    assert [len(found[node]) for node in ("n1", "n2")] == [1, 1]
