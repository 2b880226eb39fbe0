"""A private name of Ray's that is gone is an error before Ray is started, and Ray stays as it was."""

import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest
from ray._private import worker
from ray._private.node import Node
from ray._private.state import state
from ray.job_config import JobConfig

from data_service.errors import LibraryChanged
from data_service.service import ray_internals as internals

CLASSES: list[tuple[Any, str]] = [
    *(
        (Node, name)
        for name in (
            *internals.UNUSED_PROCESS_STARTERS,
            internals.DEAD_PROCESSES_METHOD,
            internals.LOGS_FOLDER_METHOD,
        )
    ),
    (worker, internals.GLOBAL_NODE_ATTRIBUTE),
    (type(state), internals.DRAINING_FUNCTION),
]


@pytest.mark.parametrize(("owner", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_a_name_that_is_gone_ends_the_start(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.delattr(owner, name)
    before = dict(vars(Node))
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("started"))
    with pytest.raises(LibraryChanged) as found:
        internals.start_ray()
    assert name in found.value.problem
    assert "ray 2." in found.value.problem
    assert dict(vars(Node)) == before


def test_folders_of_workers_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    make = JobConfig.__init__

    def renamed(self: JobConfig, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self.__dict__.pop(internals.DRIVER_SYS_PATH_FIELD)

    monkeypatch.setattr(JobConfig, "__init__", renamed)
    with pytest.raises(LibraryChanged):
        internals.job_config_without_driver_path()


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(("given", "above"), [(None, 0), ("4", 4)])
def test_workers_are_as_urgent_as_the_command(given: str | None, above: int) -> None:
    """Ray's own default is 15 above it; who sets another has it."""
    program = (
        "import os, ray\n"
        "from data_service.service.ray_internals import start_ray\n"
        "start_ray(num_cpus=1, object_store_memory=100 << 20)\n"
        "print(os.nice(0), ray.get(ray.remote(lambda: os.nice(0)).remote()))\n"
    )
    own = os.nice(0)
    environment = {name: value for name, value in os.environ.items() if name != internals.NICENESS_VARIABLE}
    ran = subprocess.run(
        ["nice", "-n", "3", sys.executable, "-c", program],
        env=environment | ({} if given is None else {internals.NICENESS_VARIABLE: given}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == [str(own + 3), str(own + 3 + above)]


@pytest.mark.cluster
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_first_worker_that_dies_as_it_starts_does_not_hold_up_the_start(number: signal.Signals) -> None:
    """Ray 2.60's own start would wait for it for ever."""
    program = (
        "import ray\n"
        "from data_service.service.ray_internals import start_ray\n"
        "start_ray(num_cpus=2, object_store_memory=100 << 20)\n"
        "print(sum(ray.get([ray.remote(lambda: 1).remote() for _ in range(2)])), flush=True)\n"
        "ray.shutdown()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as command:
        try:
            while (worker := first_worker(command.pid)) is None:
                assert command.poll() is None
            worker.send_signal(number)
            assert command.communicate(timeout=100)[0] == "2\n"
        finally:
            for child in psutil.Process(command.pid).children(recursive=True) if command.poll() is None else ():
                child.kill()
            command.kill()


def first_worker(pid: int) -> psutil.Process | None:
    """A worker that has not taken its title yet."""
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if any(part.endswith("/default_worker.py") for part in child.cmdline()[1:3]):
                return child
        except psutil.Error:
            continue
    return None
