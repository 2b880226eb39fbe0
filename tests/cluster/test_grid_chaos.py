"""A grid of 24 cells on a cluster of Ray while its workers, its drivers, a node and the store fail at random: the same
table as undisturbed, no cell begun again unless the process that had begun it was dead, no result written twice."""

import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from launcher.after.evaluate.cell import Result
from launcher.after.evaluate.evaluation import rows
from tests.support.faults.ranks import STORE_FAULTS
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server
from tests.support.tasks.grid_driver import asked
from tests.support.tasks.small_cells import diary

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(3000)]
ROOT = Path(__file__).parents[2]
MEMORY = {"object_store_memory": 100 << 20}
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
}
CELLS, STRIKES = 24, 8
KINDS = ("worker", "driver", "second driver", "store", "outage", "node")


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, faults: FaultProxy
) -> Iterator[Cluster]:
    """A head without places, and two machines that hold a cell each, all of which reach the store through `faults`."""
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # on a machine that others use, cells would get nothing
    head = {"num_cpus": 0, "temp_dir": str(tmp_path_factory.mktemp("r")), "_system_config": QUICK, **MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, **MEMORY)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    finally:
        cluster.shutdown()


@dataclass
class Commands:
    """Processes of `grid_driver` for one grid, and what they have said."""

    request: dict[str, Any]
    said: list[dict[str, Any]] = field(default_factory=list)
    running: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.tasks.grid_driver", json.dumps(self.request)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:  # Ray says things there, too
            if line.startswith("{"):
                self.said.append(json.loads(line))

    @property
    def table(self) -> list[dict[str, Any]] | None:
        return next((record["table"] for record in self.said if "table" in record), None)

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def undisturbed(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The table of cells that were computed here, one after another."""
    models, works = asked(request | {"diary": "", "seconds": 0.0})
    folders = {model.digest: model for model in models}
    results = {
        work.cell.key: Result(
            rules=1,
            cell=work.cell,
            measured=work.measure.measure(folders[work.cell.weights], work.cell.seed, Path()),
            versions={},
        )
        for work in works
    }
    assert len(results) == CELLS
    return [row.model_dump(mode="json") for row in rows([work.cell for work in works], results)]


def request(tmp_path: Path, results: str) -> dict[str, Any]:
    return {
        "results": results,
        "folder": str(tmp_path / "models"),
        "noises": [0.3, 1.0],
        "tasks": ["a", "b"],
        "lrs": [0.01, 1.0],
        "seeds": [0, 1, 2],
        "diary": str(tmp_path / "diary"),
        "seconds": 0.5,
        "cpus": 1,
    }


def begun(path: Path) -> int:
    return sum(line["what"] == "begins" for line in diary(path))


def until(condition: Callable[[], bool], commands: Commands) -> None:
    """Keeps a command running meanwhile, as a scheduler would."""
    tick = threading.Event()
    while not condition():
        if commands.table is None and all(process.poll() is not None for process in commands.running):
            commands.start()
        tick.wait(0.05)


class Chaos:
    """Strikes in an order drawn from a seed, each kind at least once; one whenever some more cells were begun."""

    def __init__(self, seed: int, cluster: Cluster, proxy: FaultProxy, commands: Commands) -> None:
        self.draw = random.Random(seed)
        self.cluster, self.proxy, self.commands = cluster, proxy, commands
        self.struck = Counter[str]()
        self.draws = [*KINDS, *self.draw.choices(KINDS, k=STRIKES - len(KINDS))]
        self.draw.shuffle(self.draws)

    def strike(self) -> None:
        kind = self.draws.pop()
        self.struck[kind] += 1
        match kind:
            case "worker":
                self._kill_worker()
            case "driver":
                self.draw.choice(self.commands.running).kill()
            case "second driver":
                self.commands.start()
            case "store":
                self.proxy.plan.extend(self.draw.choices(STORE_FAULTS, k=20))
            case "outage":
                self.proxy.always = self.draw.choice(["reset", "error 500"])
                threading.Timer(self.draw.uniform(1, 6), self._store_is_back).start()
            case "node":
                node = self.draw.choice(sorted(self.cluster.worker_nodes, key=lambda one: one.unique_id))
                self.cluster.remove_node(node, allow_graceful=False)
                self.cluster.add_node(num_cpus=1, **MEMORY)

    def _store_is_back(self) -> None:
        self.proxy.always = None

    def _kill_worker(self) -> None:
        """One that computes a cell, if there is any."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if "_compute" in " ".join(process.cmdline()):
                    found.append(process)
        if found:
            with suppress(psutil.Error):
                self.draw.choice(sorted(found, key=lambda one: one.pid)).kill()
        else:
            self.struck["no worker"] += 1


@pytest.mark.parametrize("seed", range(1, 4))
def test_the_table_is_the_same_and_nothing_is_computed_twice(
    tmp_path: Path, s3: S3Server, faults: FaultProxy, cluster: Cluster, seed: int
) -> None:
    commands = Commands(request(tmp_path, f"s3://{s3.new_bucket()}/results"))
    chaos = Chaos(seed, cluster, faults, commands)
    try:
        for strike in range(STRIKES):
            wanted = begun(tmp_path / "diary") + chaos.draw.randint(1, 3)
            until(lambda: commands.table is not None or begun(tmp_path / "diary") >= wanted, commands)  # noqa: B023
            if commands.table is not None and strike:
                break
            chaos.strike()
        until(lambda: commands.table is not None, commands)
    finally:
        commands.end()

    assert commands.table == undisturbed(commands.request)
    written = Counter(
        path
        for method, path, status in faults.carried_out
        if method in ("PUT", "DELETE") and "/results/rules-" in path and status < 300
    )
    assert sorted(written.values()) == [1] * CELLS  # by the server: also those whose answer was lost
    lines = diary(tmp_path / "diary")
    starts = Counter(line["cell"] for line in lines if line["what"] == "begins")
    ends = Counter(line["cell"] for line in lines if line["what"] == "ends")
    print(
        f"seed {seed}: {dict(chaos.struck)}; {len(commands.running)} commands; {len(starts)} cells, "
        f"{starts.total()} begun, {ends.total()} computed"
    )
    assert len(starts) == CELLS
    assert not [line for line in lines if line["living"]]
    again = Commands(commands.request)
    try:
        until(lambda: again.table is not None, again)
    finally:
        again.end()
    assert again.said[0] == {"before": CELLS}
    assert begun(tmp_path / "diary") == starts.total()
