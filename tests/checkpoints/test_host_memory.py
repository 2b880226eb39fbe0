"""How much memory is left, under limits of control groups: of this kernel, and of trees of files in the forms of both
versions."""

import random
from pathlib import Path

import psutil
import pytest

from checkpoints.host_memory import available_memory
from tests.support.clusters.memory_limit import limited_group, run_in

MIB = 1 << 20
ASK = "from checkpoints.host_memory import available_memory; print(*available_memory())"
RESERVE = """
import sys
from checkpoints.memory_slots import Slot
held = []
try:
    for _ in range(100):
        held.append(Slot.create(int(sys.argv[1]), 100))
        print(held[-1].size, flush=True)
except OSError as error:
    print("refused", error.errno, flush=True)
"""


def test_memory_is_what_can_be_had_of_what_there_is() -> None:
    available, total = available_memory()
    assert 0 < available <= total <= psutil.virtual_memory().total


@pytest.mark.parametrize("file", ["cgroup", "mounts"])
def test_a_kernel_that_tells_no_groups_has_no_limit(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("")
    available, total = available_memory(tmp_path)
    assert 0 < available <= total == psutil.virtual_memory().total


@pytest.mark.parametrize("limit", [200 * MIB, 700 * MIB])
def test_a_limit_of_the_kernel_counts(limit: int) -> None:
    with limited_group(limit) as group:
        told = run_in(group, ASK)
    available, total = map(int, told.stdout.split())
    assert total == limit
    assert limit - 100 * MIB < available < limit  # the process itself takes some


@pytest.mark.parametrize("seed", range(3))
def test_a_slot_is_refused_before_the_kernel_kills(seed: int) -> None:
    """Memory of other processes is left to them: a tenth of the limit."""
    drawn = random.Random(seed)
    limit, size = drawn.randrange(200, 900) * MIB, drawn.randrange(10, 300) * MIB
    with limited_group(limit) as group:
        told = run_in(group, RESERVE, str(size))
    assert told.returncode == 0, (limit, size, told.stderr)
    *made, last = told.stdout.splitlines()
    assert last.split()[0] == "refused"
    assert sum(map(int, made)) < 0.9 * limit


V1 = {
    "limit": "memory.limit_in_bytes",
    "used": "memory.usage_in_bytes",
    "prefix": "total_",
    "none": str(2**63 - 4096),
}
V2 = {"limit": "memory.max", "used": "memory.current", "prefix": "", "none": "max"}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("names", [V1, V2], ids=["v1", "v2"])
def test_the_tightest_of_nested_groups_counts(names: dict[str, str], seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    depth, v1 = drawn.randrange(4), names is V1
    seen_as_root = drawn.random() < 0.3  # a container whose group is mounted as the root, under a path of its host
    path = "/" + "/".join(f"g{level}" for level in range(depth))
    totals, left = [int(psutil.virtual_memory().total)], list[int]()
    for level in range(1 if seen_as_root else depth + 1):
        folder = tmp_path / "groups" / "/".join(path.strip("/").split("/")[:level])
        folder.mkdir(parents=True, exist_ok=True)
        limit = drawn.randrange(1, 1000) * MIB if drawn.random() < 0.7 else None
        used, active, inactive = (drawn.randrange(100) * 1024 for _ in range(3))
        (folder / names["limit"]).write_text(f"{limit or names['none']}\n")
        (folder / names["used"]).write_text(f"{used + active + inactive}\n")
        kinds = {"active_file": active, "inactive_file": inactive, "anon": used}
        (folder / "memory.stat").write_text(
            "".join(f"{names['prefix']}{kind} {size}\n" for kind, size in kinds.items())
        )
        if limit is not None:
            totals, left = [*totals, limit], [*left, max(0, limit - used)]
    process = tmp_path / "process"
    process.mkdir()
    (process / "cgroup").write_text(f"5:cpu:/x\n4:memory:{path}\n0::/\n" if v1 else f"1:name=systemd:/y\n0::{path}\n")
    kind = f"cgroup {tmp_path}/groups cgroup rw,memory 0 0" if v1 else f"cgroup2 {tmp_path}/groups cgroup2 rw 0 0"
    (process / "mounts").write_text(f"tmpfs /x tmpfs rw 0 0\ncgroup {tmp_path}/cpu cgroup rw,cpu 0 0\n{kind}\n")
    available, total = available_memory(process)
    assert total == min(totals)
    assert available == min(left) if left else available <= total
