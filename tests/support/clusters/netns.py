"""Machines on one host: a network namespace each, on a bridge, with links to cut and to slow; with a Ray cluster on
them or without.

Needs root and Debian's iproute2. The machines share the disk, as nodes of a cluster share a file system.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_FILES = Path("/etc/netns")  # where `ip` has files that stand in a namespace for those in /etc
_BRIDGE, _NETWORK, _PORT = "mfbr", "10.77.13", 6399
_SECRET = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}  # of all clusters of this process
_RAY_NOTICES = {  # a node that does not answer is dead after ten seconds, not after minutes
    "RAY_health_check_initial_delay_ms": "3000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}


def why_not() -> str | None:
    """Why this machine cannot have namespaces; None if it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "no ip or tc: apt-get install --no-install-recommends iproute2"
    return None


@dataclass
class Machine:
    """One namespace, `number` from 1; the first is Ray's head."""

    number: int
    folder: Path
    cpus: int
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"mf{self.number}"

    @property
    def address(self) -> str:
        return f"{_NETWORK}.{self.number}"

    def command(self, *words: str) -> list[str]:
        """`words`, to be run on this machine."""
        return ["ip", "netns", "exec", self.name, *words]

    @property
    def environment(self) -> dict[str, str]:
        """With which programs find the cluster."""
        found = {"RAY_ADDRESS": f"{_NETWORK}.1:{_PORT}", "OMP_NUM_THREADS": "1"}
        return os.environ | _RAY_NOTICES | _SECRET | found

    def boot(self) -> None:
        """Start Ray, and wait until it is part of the cluster."""
        place = ["--head", f"--port={_PORT}"] if self.number == 1 else [f"--address={_NETWORK}.1:{_PORT}"]
        options = [f"--node-ip-address={self.address}", f"--num-cpus={self.cpus}", "--disable-usage-stats"]
        options += ["--include-dashboard=false"] if self.number == 1 else []
        options += ["--object-store-memory=150000000", f"--temp-dir={self.folder}"]
        ray = str(Path(sys.executable).with_name("ray"))
        environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        _run(*self.command(ray, "start", *place, *options), environment=environment)

    def crash(self) -> None:
        """Everything on it dies at once."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        pids = _run("ip", "netns", "pids", self.name).split()
        found = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):  # it has ended since
                found.append(psutil.Process(int(pid)))
        return found

    def cut(self) -> None:
        """Take its link down: packets to and from it are lost without a word."""
        _run("ip", "link", "set", f"{self.name}v", "down")

    def heal(self) -> None:
        _run("ip", "link", "set", f"{self.name}v", "up")

    def slow(self, rate: str) -> None:
        """Limit what it receives and sends, as `10mbit`."""
        self.slow_receiving(rate)
        _run(*self.command("tc", "qdisc", "replace", "dev", "eth0", *_shape(rate)))

    def slow_receiving(self, rate: str) -> None:
        _run("tc", "qdisc", "replace", "dev", f"{self.name}v", *_shape(rate))

    def mislead(self, name: str | None) -> None:
        """Another network, which leads nowhere, and a host's own name that is `name`; None: nothing."""
        for words in (
            "link add ens0 type veth peer name nowhere",
            f"addr add 10.99.{self.number}.1/24 dev ens0",
            "link set ens0 up",
        ):
            _run(*self.command("ip", *words.split()))
        files = _FILES / self.name
        files.mkdir(parents=True, exist_ok=True)
        own = "" if name is None else f"{name} {socket.gethostname()}\n"
        (files / "hosts").write_text(f"127.0.0.1 localhost\n{own}")
        (files / "nsswitch.conf").write_text("hosts: files\n")


def _shape(rate: str) -> tuple[str, ...]:
    return ("root", "tbf", "rate", rate, "burst", "64kbit", "latency", "400ms")


@contextmanager
def machines(cpus: Sequence[int]) -> Iterator[list[Machine]]:
    """A booted cluster of as many machines as there are numbers of CPUs; gone afterwards, whatever happened."""
    with ExitStack() as all_of:
        folder = all_of.enter_context(tempfile.TemporaryDirectory(prefix="mf"))  # Ray's sockets need short paths
        made = [Machine(number, Path(folder, str(number)), n) for number, n in enumerate(cpus, start=1)]
        all_of.enter_context(connected(made))
        for machine in made:
            machine.boot()
        yield made


@contextmanager
def connected(made: Sequence[Machine]) -> Iterator[None]:
    """These machines, without Ray; gone afterwards, whatever happened."""
    _tear_down(made)  # what an interrupted test left
    try:
        _connect(made)
        yield
    finally:
        _tear_down(made)


def _connect(made: Sequence[Machine]) -> None:
    _run("ip", "link", "add", _BRIDGE, "type", "bridge")
    _run("ip", "link", "set", _BRIDGE, "up")
    for machine in made:
        name, link = machine.name, f"{machine.name}v"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", link, "master", _BRIDGE)
        _run("ip", "link", "set", link, "up")
        for words in (f"addr add {machine.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _run(*machine.command("ip", *words.split()))


def _tear_down(made: Sequence[Machine]) -> None:
    there = _run("ip", "netns", "list").split()
    for machine in made:
        if machine.name in there:
            machine.crash()
    # Links first: the kernel takes those of a deleted namespace away later, and their names are in use until then.
    links = {word.partition("@")[0].rstrip(":") for word in _run("ip", "-o", "link").split()}
    for link in links & {_BRIDGE, *(f"{machine.name}v" for machine in made)}:
        _run("ip", "link", "delete", link)
    for machine in made:
        if machine.name in there:
            _run("ip", "netns", "delete", machine.name)
        shutil.rmtree(_FILES / machine.name, ignore_errors=True)


def _run(*command: str, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout
