"""Nodes with GPUs that are not there: Ray counts them, and torch's questions to CUDA are answered as the driver would.

A process asks the driver once: what `CUDA_VISIBLE_DEVICES` says then holds for its whole life. The stand-in is
installed by a `sitecustomize` module, so it is in Ray's workers, too. It takes the place of `torch.cuda` as soon as
torch is there. torch's CUDA build asks CUDA itself, for which `fake_cuda.c` stands in.

As a program it starts a Ray cluster of such nodes and a group of ranks on it, which take their devices and do nothing
else: `python -m tests.support.clusters.fake_gpus '{"nodes": [...], "ranks": N}'`. It prints a `Found` as JSON.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[3]
MACHINE = "FAKE_GPUS"  # the ids of a machine's GPUs, separated by commas
EARLY = "FAKE_GPUS_EARLY"  # a module after which torch is imported, and CUDA asked
NCCL = (2, 31, 0)
_SITE = "from tests.support.clusters import fake_gpus\nfake_gpus.install()\n"
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "DS_ACCELERATOR")


def shown(variable: str | None, machine: Sequence[str]) -> list[str]:
    """The ids of the devices that CUDA shows a process, by its guide's rules for `CUDA_VISIBLE_DEVICES`. Of MIG
    instances it shows the first only. `machine`: ids in the order in which CUDA numbers them."""
    if variable is None:
        words = [str(number) for number in range(len(machine))]
    else:
        words = [word.strip() for word in variable.split(",")]
    found: list[str] = []
    for word in words:
        if word.isdecimal():
            named = machine[int(word)] if int(word) < len(machine) else None
        else:
            alike = [one for one in machine if one.startswith(word)] if word[:4] in ("GPU-", "MIG-") else []
            named = alike[0] if len(alike) == 1 else None
        if named is None:
            break
        if named in found:
            return []
        found.append(named)
    return found[:1] if found and found[0].startswith("MIG-") else found


class FakeCuda:
    """What stands in for `torch.cuda`. Attributes: asked: whether CUDA has been asked, after which nothing changes."""

    def __init__(self) -> None:
        self._devices: list[str] | None = None
        self._current = 0

    @property
    def asked(self) -> bool:
        return self._devices is not None

    def devices(self) -> list[str]:
        if self._devices is None:
            machine = [one for one in os.environ.get(MACHINE, "").split(",") if one]
            self._devices = shown(os.environ.get("CUDA_VISIBLE_DEVICES"), machine)
        return self._devices

    def device_count(self) -> int:
        return len(self.devices())

    def is_available(self) -> bool:
        return bool(self.devices())

    def set_device(self, number: int) -> None:
        if not 0 <= number < len(self.devices()):
            raise RuntimeError("CUDA error: invalid device ordinal")
        self._current = number

    def current_device(self) -> int:
        return self._current

    def get_device_name(self, number: int) -> str:
        return self.devices()[number]

    def take_the_place_of(self, torch: ModuleType) -> None:
        if torch.version.cuda is not None:
            return
        for name in ("device_count", "is_available", "set_device", "current_device", "get_device_name"):
            setattr(torch.cuda, name, getattr(self, name))
        torch.cuda.nccl.version = lambda: NCCL


CUDA = FakeCuda()


class _After(importlib.abc.MetaPathFinder):
    """Does something as soon as a module has been imported."""

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self._actions else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self._actions[name](module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def install() -> None:
    """In every process that is started in `environment`."""
    actions = {"torch": CUDA.take_the_place_of, "launcher.runtime.cluster.worker": _only_report}
    if early := os.environ.get(EARLY):
        actions[early] = _ask_early
    sys.meta_path.insert(0, _After(actions))


def _ask_early(module: ModuleType) -> None:
    module.__dict__["torch"] = torch = __import__("torch")
    torch.cuda.is_available()


def _only_report(worker: ModuleType) -> None:
    """A rank takes its device, and its end says as a problem which it is."""

    class Reporting:
        joined = False

        def __init__(self, group: int, seat: Any, *_: Any) -> None:
            self.seat = seat

        def join(self) -> Any:
            worker.select_device(self.seat)
            cuda, number = worker.torch.cuda, worker.torch.cuda.current_device()
            place = (self.seat.rank, self.seat.local_rank, self.seat.node_rank)
            found = RankFound(*place, cuda.device_count(), number, cuda.get_device_name(number))
            return worker.RankResult(worker.EndedUnsaved(json.dumps(asdict(found))), stays=True)

    worker.Rank = Reporting  # type: ignore[attr-defined]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """For processes that are to have the stand-in. `folder`: an empty one."""
    (folder / "sitecustomize.py").write_text(_SITE)
    inherited = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    return {**inherited, "PYTHONPATH": f"{folder}:{ROOT}", **more}


@dataclass(frozen=True)
class RankFound:
    """What a rank found: how many devices, the number of its own, and that one's id."""

    rank: int
    local_rank: int
    node: int
    devices: int
    number: int
    device: str


@dataclass
class Found:
    """What came of a group. `failed`: its ranks that failed; `problem`: what a typed error said, or a rank's end."""

    ranks: list[RankFound] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True)
class Node:
    """A node of the cluster: the ids of the machine's GPUs, and `CUDA_VISIBLE_DEVICES` as its Ray finds it."""

    machine: Sequence[str]
    variable: str | None = None

    @property
    def gpus(self) -> int:
        return len(self.machine) if self.variable is None else len(self.variable.split(","))


def compiled(folder: Path) -> Path:
    """`fake_cuda.c` as a library to preload, by CUDA's headers that Triton brings. Whoever opens the driver gets it."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    headers = Path(triton.origin).parent / "backends/nvidia/include"
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.c")
    form = ["-w", "-shared", "-fPIC", f"-I{headers}", f"-Wl,-soname,{library.name}"]
    subprocess.run(["gcc", *form, "-o", str(library), str(source)], check=True, capture_output=True)
    return library


def seated(folder: Path, nodes: Sequence[Node], ranks: int, python: str = sys.executable, **more: str) -> Found:
    """What ranks found on a Ray cluster of such nodes, in `python`'s environment."""
    order = json.dumps({"nodes": [asdict(node) for node in nodes], "ranks": ranks})
    command = [python, "-m", "tests.support.clusters.fake_gpus", order]
    result = subprocess.run(
        command, env=environment(folder, **more), cwd=ROOT, capture_output=True, text=True, timeout=540
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    return Found([RankFound(**one) for one in found["ranks"]], found["failed"], found["problem"])


def _run(nodes: Sequence[Node], ranks: int) -> Found:
    import ray
    from ray.cluster_utils import Cluster

    from data_service.service.ray_internals import job_config_without_driver_path
    from launcher.runtime.cluster.orders import Assignment, EndedUnsaved, FatalError
    from launcher.runtime.cluster.rank_group import RankGroup
    from launcher.runtime.cluster.rank_placement import SeatError
    from launcher.runtime.cluster.rank_pool import RankPool
    from launcher.runtime.policies.elastic import GroupStart, Sizing
    from launcher.runtime.policies.recovery import Recovery

    os.environ.pop("DS_ACCELERATOR", None)  # what this process saw when it imported the engine is not the nodes'
    cluster = Cluster()
    for node in nodes:
        variables = {MACHINE: ",".join(node.machine)}
        if node.variable is not None:
            variables["CUDA_VISIBLE_DEVICES"] = node.variable
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ.update(variables)  # the node's Ray counts its GPUs in this process
        cluster.add_node(num_cpus=ranks, num_gpus=node.gpus, object_store_memory=100 << 20, include_dashboard=False)
    ray.init(
        cluster.address,
        logging_level="ERROR",
        log_to_driver=False,
        job_config=job_config_without_driver_path(),
    )
    sizing = Sizing(ranks, ranks, ranks, 0.0, 0.0, {"CPU": 0.25, "GPU": 1.0})
    assignment = Assignment("", None, None, None, 1, {}, {}, {}, False, {})  # type: ignore[arg-type]
    problem = ""
    recovery = Recovery(spares=0, memory_every="never")
    with RankPool("", sizing, recovery) as pool, RankGroup(GroupStart(ranks, frozenset()), pool) as group:
        try:
            for _ in group.join(assignment, 0.25):
                pass
        except SeatError as error:
            problem = error.problem
    ends = [end.outcome for end in group.ends.values()]
    problem = problem or next((end.problem for end in ends if isinstance(end, FatalError)), "")
    ranks_found = [RankFound(**json.loads(end.reason)) for end in ends if isinstance(end, EndedUnsaved)]
    found = Found(ranks_found, group.failed, problem)
    ray.shutdown()
    cluster.shutdown()
    return found


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(asdict(_run([Node(**node) for node in asked["nodes"]], asked["ranks"]))))
